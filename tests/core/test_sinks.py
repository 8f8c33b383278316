"""Where a run's numbers go, and what a broken tracker does to a run: nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from astuner.builtin.console import ConsoleSink
from astuner.builtin.jsonl_sink import JsonlSink
from astuner.builtin.trackers import TensorboardSink
from astuner.curve import draw_reward_curve
from astuner.experiment import Experiment
from astuner.json_lines import append_jsonl, read_jsonl
from astuner.log_sink import LogSink
from astuner.run_dir import RunDir
from astuner.tasks import read_tasks
from astuner.testing.fakes import fake_config
from astuner.types import Sample

SETTINGS: dict[str, object] = {"astuner": {"project_name": "p"}}


class Broken(LogSink):
    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        raise ConnectionError("the tracker is down")


def experiment(tmp_path: Path, *sinks: LogSink, agents: str = "{}") -> Experiment:
    (tmp_path / "tasks.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    (tmp_path / "flow.py").write_text(
        "from astuner import Workflow, WorkflowOutput\nclass Flow(Workflow):\n"
        "    async def execute(self, workflow_task, model_tuner):\n        return WorkflowOutput(reward=1.0)\n"
    )
    config = fake_config(
        tmp_path,
        f"  agents: {agents}\n"
        "  rollout: {workflow: flow.py->Flow}\n"
        "  task_reader: {type: jsonl, jsonl: {training: {file_path: tasks.jsonl}}}\n",
    )
    run_dir = RunDir(tmp_path / "run")
    run_dir.start()
    return Experiment(config, run_dir, read_tasks(config), sinks=sinks)


def test_a_sink_that_raises_is_reported_once_and_left_out(tmp_path: Path) -> None:
    run = experiment(tmp_path, JsonlSink(), Broken())
    run.log(1, {"reward/mean": 0.5})
    run.log(2, {"reward/mean": 0.75})
    run.close()
    assert [row["reward/mean"] for row in run.run_dir.read_metrics()] == [0.5, 0.75]
    notes = run.run_dir.log.read_text().splitlines()
    assert len(notes) == 1
    assert "Broken failed and is left out from now on: ConnectionError: the tracker is down" in notes[0]


def test_a_row_cut_off_by_a_crash_is_left_out_and_rewinding_forgets_later_steps(tmp_path: Path) -> None:
    run = experiment(tmp_path, JsonlSink())
    for step in (1, 2, 3):
        run.log(step, {"reward/mean": 0.0})
    with run.run_dir.metrics.open("a") as file:
        file.write('{"step": 4, "reward/me')
    assert [row["step"] for row in run.run_dir.read_metrics()] == [1, 2, 3]
    run.run_dir.rewind(2)
    assert [json.loads(line)["step"] for line in run.run_dir.metrics.read_text().splitlines()] == [1, 2]
    run.close()


def test_tensorboard_writes_what_tensorboard_reads(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorboardSink()
    sink.open(tmp_path, "run", SETTINGS)
    sink.step(3, {"reward/mean": 0.5})
    sink.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (point,) = events.Scalars("reward/mean")
    assert (point.step, point.value) == (3, 0.5)


def test_the_console_tells_reward_success_speed_and_time_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sink = ConsoleSink()
    sink.open(tmp_path, "run", SETTINGS)
    sink.progress(1, 3, 1, 8, "rollout")
    for step in (1, 2, 3):
        sink.step(
            step,
            {
                "reward/mean": 0.25,
                "success/mean": 0.5,
                "throughput/tokens_per_s": 1234.5,
                "rollout/errored_frac": 0.125,
            },
        )
    sink.step(3, {"val/success": 0.75, "val/success_ci_low": 0.7, "val/success_ci_high": 0.8, "val/tasks": 200.0})
    sink.note("the end")
    sink.close()
    captured = capsys.readouterr()
    assert captured.out == ""  # stdout is for results
    lines = captured.err.splitlines()
    assert lines[0].startswith("step    1/3  reward 0.250  success 0.500  1,234 tok/s  12% of episodes failed")
    assert "left" in lines[1]
    assert lines[-2] == "step    3  held-out success 0.750 [0.700, 0.800] of 200 tasks"
    assert lines[-1] == "the end"


def test_barren_steps_are_said_loudly_but_not_one_by_one(tmp_path: Path) -> None:
    run = experiment(tmp_path, JsonlSink())
    for step in range(1, 11):
        run.watch_learning(step, [])
    run.close()
    notes = run.run_dir.log.read_text().splitlines()
    assert [note.split("nothing to learn from in ")[1][:2] for note in notes] == ["5 ", "10"]


def test_barren_steps_are_counted_for_each_policy_and_survive_a_resume(tmp_path: Path) -> None:
    run = experiment(tmp_path, JsonlSink(), agents="{w: {policy: a}, v: {policy: b}, x: {policy: c}}")
    state = run.state()
    for step in range(1, 6):
        run.watch_learning(step, [_sample("a", 0.5, advantage=1.0), _sample("b", 0.5)])
        state = run.state()
    run.restore(json.loads(json.dumps(state)), 5)
    for step in range(6, 11):
        run.watch_learning(step, [_sample("a", 1.0), _sample("b", 0.5, advantage=step - 6)])
    run.close()
    notes = [line.split("step ")[1].split(";")[0] for line in run.run_dir.log.read_text().splitlines()]
    assert notes == [
        "5: nothing to learn from for the policy b in 5 steps, all rewards are 0.5",
        "5: nothing to learn from for the policy c in 5 steps, no agent that speaks with it has said anything",
        "10: every episode of the last 5 steps succeeded: nothing to learn for the policy a",
        "10: nothing to learn from for the policy c in 10 steps, no agent that speaks with it has said anything",
    ]


def _sample(policy: str, reward: float, advantage: float = 0.0) -> Sample:
    return Sample(
        episode_id="e", group_id="g", agent="x", input_ids=[1, 2], loss_mask=[0, 1], logprobs=[0.0, -1.0],
        policy_version=0, reward=reward, advantage=advantage, policy=policy,
    )  # fmt: skip


def test_the_curve_shows_training_and_held_out_points(tmp_path: Path) -> None:
    rows = [{"step": i, "reward/mean": i / 10} for i in range(1, 11)]
    rows += [{"step": 10, "val/success": 0.5, "val/success_ci_low": 0.4, "val/success_ci_high": 0.6}]
    assert draw_reward_curve(rows, tmp_path / "curve.png") == str(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 5_000


def test_an_earlier_runs_folder_is_kept_under_another_name_each_time(tmp_path: Path) -> None:
    folder = RunDir(tmp_path / "run")
    kept = []
    for number in range(3):
        kept.append(folder.start())
        (folder.path / "number").write_text(str(number))
    assert kept[0] is None
    assert [(p / "number").read_text() for p in kept[1:] if p] == ["0", "1"]


class CannotOpen(LogSink):
    def open(self, run_dir: Path, run_name: str, settings: Mapping[str, object]) -> None:
        raise ConnectionError("no network")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        raise AssertionError("left out")


def test_a_tracker_that_cannot_be_opened_is_left_out_too(tmp_path: Path) -> None:
    run = experiment(tmp_path, JsonlSink(), CannotOpen())
    run.log(1, {"reward/mean": 0.5})
    run.close()
    assert "CannotOpen failed and is left out" in run.run_dir.log.read_text()


def test_the_run_folders_own_books_are_not_optional(tmp_path: Path) -> None:
    run = experiment(tmp_path, JsonlSink())
    run.run_dir.metrics.mkdir()  # nothing can be appended to a folder
    with pytest.raises(IsADirectoryError):
        run.log(1, {"reward/mean": 0.5})
    run.close()


def test_whatever_a_model_writes_can_be_written_down_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    append_jsonl(path, {"text": "half a pair: \ud800, é, 你", "number": float("nan"), "object": object})
    (row,) = read_jsonl(path)
    assert row["text"] == "half a pair: \ud800, é, 你"
    assert row["number"] is None
