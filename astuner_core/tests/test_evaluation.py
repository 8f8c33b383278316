"""Episodes that fail are in no success, and wherever a success is shown it says how many they were."""

from __future__ import annotations

from pathlib import Path

import pytest

from astuner.builtin.console import ConsoleSink, JsonlSink
from astuner.contracts.errors import RunError
from astuner.contracts.events import StepEnded
from astuner.rollout.metrics import Evaluation, counted
from astuner.runs.launch import finish
from astuner.runs.run import TrainingRun
from astuner.runs.run_dir import RunDir
from astuner.runs.tasks import read_tasks
from astuner_testing.fakes import fake_config

FLOW = """
from astuner import Workflow, WorkflowOutput

class Flow(Workflow):
    async def execute(self, workflow_task, model_tuner):
        if workflow_task.task.main_query == "bad":
            raise ValueError("cannot be played")
        return WorkflowOutput(reward=1.0)
"""


def experiment(tmp_path: Path, *, bad: int, good: int = 5, rollout: str = "") -> TrainingRun:
    line = '{{"question": "{}", "answer": "2"}}\n'.format
    (tmp_path / "train.jsonl").write_text(line("good"))
    (tmp_path / "held_out.jsonl").write_text(line("bad") * bad + line("good") * good)
    (tmp_path / "flow.py").write_text(FLOW)
    config = fake_config(
        tmp_path,
        f"  rollout: {{workflow: flow.py->Flow{rollout}}}\n"
        "  task_reader: {type: jsonl, jsonl: {training: {file_path: train.jsonl}, "
        "validation: {file_path: held_out.jsonl}}}\n",
    )
    run_dir = RunDir(tmp_path / "run")
    run_dir.start()
    return TrainingRun(config, run_dir, read_tasks(config), sinks=[JsonlSink(), ConsoleSink()])


def validated(run: TrainingRun, step: int = 0) -> Evaluation:
    found = run.validate({}, step)
    assert found is not None
    return found


def test_failed_episodes_are_told_beside_every_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = experiment(tmp_path, bad=27, rollout=", max_failed_share: 0.9")
    found = validated(run)
    assert (found.success, found.tasks, found.unscored_tasks, found.failed_episodes) == (1.0, 5, 27, 27)
    of = "5 of 32 tasks; 27 episodes failed and were not counted"
    assert str(found).endswith(f"] of {of}")
    assert f"validation success 1.000 [{found.ci_low:.3f}, 1.000] of {of}" in capsys.readouterr().err
    run.publish(StepEnded(step=0, metrics={"reward/mean": 1.0}))
    validated(run, 1)
    summary = finish(run, trains=False).summary()
    run.close()
    before, after = summary.splitlines()[:2]
    assert before.startswith("Success before ")
    assert after.startswith("Success after ")
    assert before.endswith(f"; {of}; step 0)")
    assert after.endswith(f"; {of}; step 1)")


def test_too_many_failures_in_a_validation_stop_the_run_with_the_first_one(tmp_path: Path) -> None:
    run = experiment(tmp_path, bad=27)
    with pytest.raises(RunError) as stopped:
        validated(run)
    run.close()
    message = str(stopped.value)
    assert "27 of 32 episodes failed (more than rollout.max_failed_share = 0.5)" in message
    assert "first one: workflow_failed: the workflow raised ValueError: cannot be played" in message
    assert message.endswith(f"All failures are in {run.run_dir.failures}")


def test_half_of_them_may_fail_and_not_all(tmp_path: Path) -> None:
    run = experiment(tmp_path, bad=5)
    assert validated(run).failed_episodes == 5
    run.close()
    run = experiment(tmp_path, bad=5, good=0, rollout=", max_failed_share: 1")
    with pytest.raises(RunError, match=r"none of 5 episodes could be scored. The first one: workflow_failed"):
        validated(run)
    run.close()


def test_a_success_without_failures_says_only_the_tasks() -> None:
    assert counted({"val/tasks": 5.0, "val/unscored_tasks": 0.0, "val/failed_episodes": 0.0}) == "5 tasks"
    assert counted({"val/tasks": 5.0}) == "5 tasks", "rows of an older run"
    assert counted({"val/tasks": 5.0, "val/failed_episodes": 2.0}).startswith("5 tasks; 2 episodes failed")
