"""Where a run's numbers go, and what a broken tracker does to a run: nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from astuner.builtin.console import ConsoleSink, JsonlSink
from astuner.contracts.events import Progressed, StepEnded
from astuner.contracts.log_sink import LogSink
from astuner.contracts.types import Sample
from astuner.rollout.metrics import sample_metrics
from astuner.runs.run import TrainingRun
from astuner.runs.run_dir import RunDir
from astuner.runs.tasks import read_tasks
from astuner.support.json_lines import append_jsonl, read_jsonl, write_jsonl
from astuner_report.curve import draw_reward_curve
from astuner_testing.fakes import fake_config
from astuner_trackers.trackers import TensorboardSink

SETTINGS: dict[str, object] = {"astuner": {"project_name": "p"}}


class Broken(LogSink):
    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        raise ConnectionError("the tracker is down")


def experiment(tmp_path: Path, *sinks: LogSink, agents: str = "{}") -> TrainingRun:
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
    return TrainingRun(config, run_dir, read_tasks(config), sinks=sinks)


def test_a_sink_that_raises_is_reported_once_and_left_out(tmp_path: Path) -> None:
    run = experiment(tmp_path, JsonlSink(), Broken())
    run.publish(StepEnded(step=1, metrics={"reward/mean": 0.5}))
    run.publish(StepEnded(step=2, metrics={"reward/mean": 0.75}))
    run.close()
    assert [row["reward/mean"] for row in run.run_dir.read_metrics()] == [0.5, 0.75]
    notes = run.run_dir.log.read_text().splitlines()
    assert len(notes) == 1
    assert "Broken failed and is disabled for the rest of the run: ConnectionError: the tracker is down" in notes[0]


class Talkative(LogSink):
    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.remark(f"the tracker was down in step {step}")

    def close(self) -> None:
        self.remark("it took the rest")


def test_what_a_sink_remarks_is_told_in_order_and_it_goes_on(tmp_path: Path) -> None:
    run = experiment(tmp_path, JsonlSink(), Talkative())
    run.publish(StepEnded(step=1, metrics={"reward/mean": 0.5}))
    run.publish(StepEnded(step=2, metrics={"reward/mean": 0.75}))
    run.close()
    notes = [line.split(maxsplit=2)[2] for line in run.run_dir.log.read_text().splitlines()]  # behind date and time
    assert notes == ["the tracker was down in step 1", "the tracker was down in step 2", "it took the rest"]


class BadEnd(LogSink):
    direct = True

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        return None

    def close(self) -> None:
        raise ValueError("it does not close")


def test_what_fails_when_it_closes_is_said_too(tmp_path: Path) -> None:
    run = experiment(tmp_path, JsonlSink(), BadEnd())
    run.close()
    assert (
        "BadEnd failed and is disabled for the rest of the run: ValueError: it does not close"
        in run.run_dir.log.read_text()
    )


def test_a_row_cut_off_by_a_crash_is_left_out_and_rewinding_forgets_later_steps(tmp_path: Path) -> None:
    run = experiment(tmp_path, JsonlSink())
    for step in (1, 2, 3):
        run.publish(StepEnded(step=step, metrics={"reward/mean": 0.0} | ({"val/success": 0.5} if step == 1 else {})))
    with run.run_dir.metrics.open("a") as file:
        file.write('{"step": 4, "reward/me')
    assert [row["step"] for row in run.run_dir.read_metrics()] == [1, 2, 3]
    failed = [{"step": 1, "episode_id": "v000001-0-0"}, {"step": 2, "episode_id": "g7-1"}]
    begun = {"step": 2, "episode_id": "v000002-0-0"}  # its validation did not end, and will be begun again
    write_jsonl(run.run_dir.failures, [*failed, begun])
    run.run_dir.rewind(2)
    assert [json.loads(line)["step"] for line in run.run_dir.metrics.read_text().splitlines()] == [1, 2]
    assert read_jsonl(run.run_dir.failures) == failed
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


def test_tensorboard_shows_steps_that_are_done_again_once_and_a_killed_run_loses_none(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def shown(name: str) -> list[tuple[int, float]]:
        events = EventAccumulator(str(tmp_path / "tensorboard"))
        events.Reload()
        return [(point.step, point.value) for point in events.Scalars(name)]

    killed = TensorboardSink()
    killed.open(tmp_path, "run", SETTINGS)
    for step in (1, 2, 3):
        killed.step(step, {"reward/mean": 0.0})
        killed.step(step, {"val/success": 0.0, "time/validation": 1.0})
    assert shown("reward/mean") == [(1, 0.0), (2, 0.0), (3, 0.0)]  # though it was never closed
    again = TensorboardSink()
    again.open(tmp_path, "run", SETTINGS)
    again.step(2, {"reward/mean": 0.5})
    assert shown("reward/mean") == [(1, 0.0), (2, 0.5)]
    assert shown("val/success") == [(1, 0.0)]
    only_validated = TensorboardSink()
    only_validated.open(tmp_path, "run", SETTINGS)
    only_validated.step(2, {"val/success": 0.5, "time/validation": 1.0})
    assert shown("reward/mean") == [(1, 0.0), (2, 0.5)]
    assert shown("val/success") == [(1, 0.0), (2, 0.5)]
    for sink in (killed, again, only_validated):
        sink.close()


def test_the_console_tells_reward_success_speed_and_time_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sink = ConsoleSink()
    sink.open(tmp_path, "run", SETTINGS)
    sink.handle(Progressed(step=1, total_steps=3, done=1, total=8, what="rollout"))
    for step in (1, 2, 3):
        metrics = {
            "reward/mean": 0.25,
            "success/mean": 0.5,
            "throughput/tokens_per_s": 1234.5,
            "rollout/errored_frac": 0.125,
        }
        sink.handle(StepEnded(step=step, metrics=metrics, remaining=None if step == 1 else 150.0))
    sink.step(3, {"val/success": 0.75, "val/success_ci_low": 0.7, "val/success_ci_high": 0.8, "val/tasks": 200.0})
    sink.note("the end")
    sink.close()
    captured = capsys.readouterr()
    assert captured.out == ""  # stdout is for results
    lines = captured.err.splitlines()
    speed = "generated 1,234 tokens/s"
    assert lines[0].startswith(f"step    1/3  reward 0.250  success 0.500  {speed}  12 % of episodes failed")
    assert lines[1].endswith("2 min 29 s left") or lines[1].endswith("2 min 30 s left")
    assert lines[-2] == "step    3  validation success 0.750 [0.700, 0.800] of 200 tasks"
    assert lines[-1] == "the end"


def test_an_alarm_is_a_note_and_a_line_of_its_own_and_is_forgotten_with_its_step(tmp_path: Path) -> None:
    run = experiment(tmp_path, JsonlSink())
    barren = {"reward/mean": 0.5, "adv/zero_frac": 1.0, "adv/reward_min": 0.5, "adv/reward_max": 0.5}
    for step in range(1, 8):
        run.publish(StepEnded(step=step, metrics=barren))
    (alarm,) = read_jsonl(run.run_dir.alarms)
    assert (alarm["step"], alarm["rule"]) == (5, "zero_variance")
    (note,) = run.run_dir.log.read_text().splitlines()
    assert "WARNING (zero_variance) step 5: All rewards of the last 5 steps are 0.5, " in note
    state = json.loads(json.dumps(run.state()))
    run.restore(state, 6)
    for step in range(7, 20):
        run.publish(StepEnded(step=step, metrics=barren))
    assert len(read_jsonl(run.run_dir.alarms)) == 1  # said before, so not again
    run.restore(state, 3)
    assert read_jsonl(run.run_dir.alarms) == []
    run.publish(StepEnded(step=4, metrics=barren))
    run.publish(StepEnded(step=5, metrics=barren))
    assert [a["step"] for a in read_jsonl(run.run_dir.alarms)] == [5]
    run.close()


def test_an_older_state_is_restored(tmp_path: Path) -> None:
    run = experiment(tmp_path, JsonlSink())
    run.restore(run.state() | {"barren_steps": 3}, 0)
    run.close()


def test_what_there_is_to_learn_from_is_told_apart_by_policy() -> None:
    samples = [_sample("a", 0.5, advantage=1.0), _sample("a", 1.0), _sample("b", 0.5)]
    found = sample_metrics(samples, 4, 7, policies=("a", "b", "c"))
    assert (found["adv/zero_frac"], found["adv/reward_min"], found["adv/reward_max"]) == (2 / 3, 0.5, 1.0)
    assert (found["policy/a/adv/zero_frac"], found["policy/b/adv/zero_frac"]) == (0.5, 1.0)
    assert found["policy/b/adv/reward_max"] == 0.5
    assert found["policy/c/adv/zero_frac"] == 1.0
    assert "policy/c/adv/reward_max" not in found  # it said nothing
    assert found["merge/untrained_rollout_frac"] == 0.75
    assert (found["policy_version"], found["staleness/max"]) == (0.0, 7.0)


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
    run.publish(StepEnded(step=1, metrics={"reward/mean": 0.5}))
    run.close()
    assert "CannotOpen failed and is disabled" in run.run_dir.log.read_text()


def test_the_run_folders_own_books_are_not_optional(tmp_path: Path) -> None:
    run = experiment(tmp_path, JsonlSink())
    run.run_dir.metrics.mkdir()  # nothing can be appended to a folder
    with pytest.raises(IsADirectoryError):
        run.publish(StepEnded(step=1, metrics={"reward/mean": 0.5}))
    run.close()


def test_whatever_a_model_writes_can_be_written_down_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    text = "half a pair: \ud800, é, 你; ends of lines elsewhere: \u2028 \u2029 \x85 \x0b \x0c \x1c \r"
    append_jsonl(path, {"text": text, "number": float("nan"), "object": object})
    with path.open("a") as file:
        file.write('{"text": "torn')
    (row,) = read_jsonl(path)
    assert row["text"] == text
    assert row["number"] is None
