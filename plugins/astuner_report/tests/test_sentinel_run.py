"""The sentinel in real runs: the `local` backbone, the tiny model and the real agent, with a fault planted in each."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from astuner import RunDir, run
from astuner.contracts.errors import RunError
from astuner.contracts.types import Episode, Generation, SamplingParams
from astuner.support.json_lines import read_jsonl
from astuner_report.run_report.facts import gather

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "math_agent" / "math_agent.yaml"
SENTINEL = "astuner.trainer_common.sentinel"
JUDGE = """
from astuner import Judge, JudgeOutput

class Constant(Judge):
    async def judge(self, workflow_task, output):
        return JudgeOutput(reward=0.5)
"""
Train = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """Run some steps of the example in ``tmp_path / "run"``; the alarms that were raised."""

    def train(*overrides: str, steps: int, resume: Any = "auto") -> list[dict[str, Any]]:
        common = {"total_steps": steps, "test_freq": 1000, "val_before_train": "false", "resume_freq": 1}
        given = [f"astuner.trainer_common.{key}={value}" for key, value in common.items()]
        given += [f"astuner.data.{key}" for key in ("train_batch_size=2", "max_validation_tasks=1")]
        given += ["astuner.rollout.num_repeat=4"]
        given += ["astuner.rollout.compute_madness_checklist=[]"]  # what it aborts gets a reward of its own
        given += [f"astuner.experiment_dir={tmp_path}", "astuner.experiment_name=run", *overrides]
        run(EXAMPLE, given, backbone="local", resume=resume)
        return alarms(tmp_path)

    return train


def alarms(tmp_path: Path) -> list[dict[str, Any]]:
    return read_jsonl(tmp_path / "run" / "alarms.jsonl")


@pytest.mark.slow
def test_a_constant_judge_is_zero_variance_and_the_alarm_survives_a_resume(tmp_path: Path, train: Train) -> None:
    (tmp_path / "constant.py").write_text(JUDGE)
    judge = f"astuner.task_judge.judge={tmp_path}/constant.py->Constant"
    (alarm,) = train(judge, steps=6)
    assert (alarm["step"], alarm["rule"], alarm["severity"]) == (5, "zero_variance", "warning")
    assert alarm["message"] == "All rewards of the last 5 steps are 0.5, so the policy gets no learning signal"
    assert set(alarm) == {"step", "time", "rule", "severity", "message", "advice"}
    folder = tmp_path / "run"
    assert "WARNING (zero_variance) step 5: All rewards" in (folder / "run.log").read_text()
    assert (
        "All rewards of the last 5 steps are 0.5, so the policy gets no learning signal"
        in (folder / "report.html").read_text()
    )
    (told,) = json.loads((folder / "summary.json").read_text())["report"]["alarms"]
    lasted = {"held": 2, "of": 6, "tokens_share": told["tokens_share"]}
    assert told == alarm | lasted | {"first_step": 5, "last_step": 6, "current": True}
    assert train(judge, steps=8, resume="must") == [alarm]  # said before, so not again


@pytest.mark.slow
def test_stop_on_ends_the_run_at_the_next_step_and_it_can_go_on(tmp_path: Path, train: Train) -> None:
    (tmp_path / "constant.py").write_text(JUDGE)
    settings = [f"astuner.task_judge.judge={tmp_path}/constant.py->Constant", f"{SENTINEL}.stop_on=[zero_variance]"]
    with pytest.raises(RunError, match=r"after step 5 \(zero_variance\): All rewards .* are 0\.5,.*--resume"):
        train(*settings, steps=7)
    folder = tmp_path / "run"
    assert [row["step"] for row in read_jsonl(folder / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    assert "failed" in (folder / "report.md").read_text()
    assert not (folder / "summary.json").exists()
    assert len(train(*settings, steps=7, resume="must")) == 1
    assert [row["step"] for row in read_jsonl(folder / "metrics.jsonl") if "reward/mean" in row][-1] == 7


def test_empty_masks_are_an_alarm_at_once(tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    from astuner.rollout.turns import build_samples as build

    def emptied(episode: Episode, **options: Any) -> Any:
        return build(replace(episode, turns=[replace(turn, trained=False) for turn in episode.turns]), **options)

    monkeypatch.setattr("astuner.runs.run.build_samples", emptied)
    first = train(steps=1)[0]
    assert (first["step"], first["rule"], first["severity"]) == (1, "empty_masks", "error")
    assert "generated tokens is in a loss mask" in first["message"]


def test_an_engine_that_keeps_its_weights_is_an_alarm(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    from astuner_local.engine import LocalEngine

    updated = LocalEngine.weights_updated
    monkeypatch.setattr(LocalEngine, "weights_updated", lambda self, version: updated(self, 0))
    (alarm,) = train(steps=3)
    assert (alarm["step"], alarm["rule"], alarm["severity"]) == (2, "stale_weights", "error")
    assert "1 updates older" in alarm["message"]


def lies(monkeypatch: pytest.MonkeyPatch, change: Callable[[Generation], Generation], **sampling: Any) -> None:
    """Have the engine sample with ``sampling``, and say ``change`` of what it did."""
    from astuner_local.engine import LocalEngine

    generate = LocalEngine.generate

    async def lying(self: Any, prompt: Sequence[int], given: SamplingParams, **options: Any) -> Generation:
        return change(await generate(self, prompt, replace(given, **sampling), **options))

    monkeypatch.setattr(LocalEngine, "generate", lying)


@pytest.mark.slow
def test_an_engine_with_a_temperature_of_its_own_gives_duplicates(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    lies(monkeypatch, lambda g: replace(g, logprobs=[p - 0.05 for p in g.logprobs]), temperature=0.0)
    rules = {alarm["rule"]: alarm for alarm in train(steps=6)}
    assert rules["duplicate_answers"]["step"] <= 5
    assert "100 % of the pairs of attempts at a task are equal" in rules["duplicate_answers"]["message"]


@pytest.mark.slow
def test_an_engine_whose_logprobs_are_of_other_weights_is_an_alarm(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    lies(monkeypatch, lambda g: replace(g, logprobs=[p - 0.3 for p in g.logprobs]))
    drift = next(alarm for alarm in train(steps=4) if alarm["rule"] == "logprob_drift")
    assert drift["step"] == 3
    assert "differ by 0.3 on average" in drift["message"]


@pytest.mark.slow
def test_a_healthy_run_raises_none_and_one_that_is_not_watched_says_nothing(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train(steps=6) == []
    assert not (tmp_path / "run" / "alarms.jsonl").exists()
    lies(monkeypatch, lambda g: replace(g, logprobs=[p - 0.3 for p in g.logprobs]))
    assert train(f"{SENTINEL}.enabled=false", steps=4) == []


PLANTED_JUDGES = """
import random

from astuner import Judge, JudgeOutput
from astuner_math.judges import MathAnswerAsJudge


class Random(Judge):
    def __init__(self, config):
        super().__init__(config)
        self.draw = random.Random(config.astuner.seed)

    async def judge(self, workflow_task, output):
        return JudgeOutput(reward=float(self.draw.random() < 0.5))


class Swapped(Judge):
    def __init__(self, config):
        super().__init__(config)
        self.right = MathAnswerAsJudge()

    async def judge(self, workflow_task, output):
        right = self.right.judge(workflow_task, output)
        right = right if isinstance(right, JudgeOutput) else await right
        return JudgeOutput(reward=1 - right.reward, is_success=right.reward >= 1)
"""
PLANTED: dict[str, tuple[str, int, Sequence[str]]] = {
    "learning rate 0": ("learning_rate", 5, ["astuner.trainer_common.optim.lr=0"]),
    "learning rate x 100": ("learning_rate", 8, ["astuner.trainer_common.optim.lr=0.17"]),
    "a random judge": ("random_reward", 10, ["astuner.task_judge.judge={folder}/planted.py->Random"]),
    "a constant judge": ("zero_variance", 20, ["astuner.task_judge.judge={folder}/constant.py->Constant"]),
    "a swapped sign": ("reward_success_apart", 20, ["astuner.task_judge.judge={folder}/planted.py->Swapped"]),
    "nothing moves": ("no_progress", 60, ["astuner.trainer_common.optim.lr=1e-9", "astuner.data.train_batch_size=8"]),
    "the answer is told": (
        "train_only",
        60,
        ["astuner.task_reader.jsonl.training.file_path={folder}/told.jsonl", "astuner.data.leakage=allow"],
    ),
}
"""What is wrong -> the rule that names it, until which step, and what makes it so."""
COMES_LATE = ("nothing moves", "the answer is told")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [31, 32, 33])
@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_fault_is_named_within_three_validations(tmp_path: Path, what: str, seed: int) -> None:
    """100 steps of the example with a validation every 20, ended as soon as the fault is named."""
    rule, until, fault = PLANTED[what]
    (tmp_path / "planted.py").write_text(PLANTED_JUDGES)
    (tmp_path / "constant.py").write_text(JUDGE)
    tasks = read_jsonl(EXAMPLE.parent / "data" / "train.jsonl")
    told = [{**task, "question": task["answer"].rpartition(" ")[2]} for task in tasks]  # nothing else to learn from
    (tmp_path / "told.jsonl").write_text("".join(json.dumps(task) + "\n" for task in told))
    common = {"total_steps": 100, "test_freq": 20, "save_freq": 1000, "resume_freq": 1000}
    given = [f"astuner.trainer_common.{key}={value}" for key, value in common.items()]
    given += [f"astuner.data.max_validation_tasks={256 if what in COMES_LATE else 16}", f"{SENTINEL}.stop_on=[{rule}]"]
    given += [f"astuner.experiment_dir={tmp_path}", "astuner.experiment_name=run", f"astuner.seed={seed}"]
    with pytest.raises(RunError, match=rf"stop_on stopped the run after step \d+ \({rule}\)"):
        run(EXAMPLE, [*given, *(override.format(folder=tmp_path) for override in fault)], backbone="local")
    (named,) = [alarm for alarm in alarms(tmp_path) if alarm["rule"] == rule]
    assert named["step"] <= until
    causes = [alarm["rule"] for alarm in gather(RunDir(tmp_path / "run"))["alarms"]]
    if what == "the answer is told":  # validation falls and the box is forgotten, in some runs: as true
        assert set(causes) <= {rule, "reward_hacking", "invalid_rising"}
    else:
        assert causes == [rule]
