"""Rewards, metrics and scores may be numbers of any library; what is not a number is refused where it was returned."""

from __future__ import annotations

import asyncio
import json
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from astuner.chat.codec import ChatCodec
from astuner.contracts.environment import Evaluation
from astuner.contracts.scalars import as_bool, as_float
from astuner.contracts.types import (
    SUCCESS_TOLERANCE,
    Episode,
    JudgeOutput,
    SamplingParams,
    Split,
    StopReason,
    Task,
    as_reward,
    counts_as_success,
    is_reward,
)
from astuner.rollout.judging import LONGEST_VALUE, as_output, as_verdict, as_verdicts
from astuner.rollout.models import one_model
from astuner.rollout.pool import RolloutPool
from astuner.rollout.runner import EpisodeRunner
from astuner.rollout.threads import Misbehaved
from astuner.testing import FakeEngine, fake_config, make_tokenizer
from tests.table import table


class Measured:
    """A number of a library that nobody knows."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __float__(self) -> float:
        return self.value


class Indexed:
    def __index__(self) -> int:
        return 3


class Angry:
    def __float__(self) -> float:
        raise RuntimeError("not today")


NUMBERS: list[tuple[Any, float]] = [
    (1, 1.0),
    (True, 1.0),
    (np.float16(0.5), 0.5),
    (np.float32(0.5), 0.5),
    (np.float64(0.25), 0.25),
    (np.longdouble(0.25), 0.25),
    (np.int8(-3), -3.0),
    (np.int64(7), 7.0),
    (np.uint32(7), 7.0),
    (np.bool_(True), 1.0),
    (np.bool_(False), 0.0),
    (np.array(0.5), 0.5),
    (np.array([0.5], dtype=np.float32), 0.5),
    (np.array([[2]]), 2.0),
    (np.array([True]), 1.0),
    (np.array(0.5, dtype=object), 0.5),
    (np.ma.array([3]), 3.0),
    (np.array([0.2, 0.6], dtype=np.float32).mean(), float(np.float32(0.4))),
    (Decimal("0.125"), 0.125),
    (Fraction(1, 4), 0.25),
    (Measured(0.75), 0.75),
    (Indexed(), 3.0),
]
OTHERS: list[Any] = [
    "0.5",
    b"0.5",
    np.str_("0.5"),
    np.array("0.5"),
    np.array("0.5", dtype=object),
    None,
    1j,
    1 + 0j,
    np.complex64(1),
    np.array([1 + 2j]),
    float("nan"),
    float("inf"),
    -np.float32("inf"),
    np.float64("nan"),
    Decimal("NaN"),
    Decimal("sNaN"),
    Decimal("1e400"),
    10**400,
    Fraction(10**400),
    (0.5,),
    (0.5, 0.5, 0.5),
    [0.5],
    np.array([0.5, 0.5]),
    np.array([]),
    np.ma.masked,
    np.datetime64("2026-01-01"),
    np.timedelta64(3, "s"),
    {0.5},
    Measured,
    Measured(float("nan")),
    Angry(),
    object(),
    float,
    iter([1.0]),
]


@table("value, number", NUMBERS)
def test_a_number_of_any_library_is_a_reward(value: Any, number: float) -> None:
    found = as_float(value)
    assert (found, type(found)) == (number, float)
    assert as_reward(value) == JudgeOutput(reward=value).reward == as_output(value).reward == number
    verdict = as_verdict(JudgeOutput(reward=value, rewards={"a": value}, metrics={"m": value}))
    assert json.loads(json.dumps([verdict.reward, dict(verdict.rewards), dict(verdict.metrics)])) == [
        number, {"a": number}, {"m": number},
    ]  # fmt: skip
    assert [v.reward for v in as_verdicts([value, (value, None)], 2)] == [number, number]  # type: ignore[union-attr]
    assert Evaluation(score=value).score == number


@table("value", OTHERS)
def test_what_is_not_one_number_is_no_reward(value: Any) -> None:
    assert as_float(value) is None
    with pytest.raises(ValueError, match="a reward must be a finite number"):
        JudgeOutput(reward=value)
    with pytest.raises(ValueError, match="the score must be a finite number"):
        Evaluation(score=value)
    for read in (as_verdict, lambda returned: as_verdicts([returned], 1)):
        with pytest.raises(Misbehaved, match=r"returned") as told:
            read(value)
        assert len(str(told.value)) < LONGEST_VALUE + 200
    metrics = {"m": value}
    with pytest.raises(Misbehaved, match="returned the metric m"):
        as_verdict(JudgeOutput(reward=1.0, metrics=metrics))


@table("value, truth", [(True, True), (np.bool_(False), False), (np.array(True), True), (np.array([False]), False)])
def test_a_truth_value_of_any_library_is_a_success(value: Any, truth: bool) -> None:
    assert as_bool(value) is truth
    assert JudgeOutput(reward=0.5, is_success=value).succeeded is truth
    assert Evaluation(score=0.5, success=value).is_success is truth
    assert as_verdict((0.5, value)).is_success is truth


@table(
    "value", [1, 0.0, "True", np.float32(1), np.array([True, False]), np.array([], dtype=bool), np.array("True"), ()]
)
def test_nothing_else_is_a_success(value: Any) -> None:
    assert as_bool(value) is None
    with pytest.raises(Misbehaved, match="is_success must be True, False or None"):
        as_verdict((0.5, value))


def test_json_knows_no_other_numbers() -> None:
    assert is_reward(1)
    assert not any(map(is_reward, (True, np.float32(1), "1", 1e10, float("nan"))))


@pytest.mark.slow  # torch is imported
def test_a_tensor_with_one_element_is_a_number() -> None:
    torch = pytest.importorskip("torch")
    one = torch.tensor
    for value in (one(0.5), one([0.5]), one(0.5, dtype=torch.bfloat16), one(0.5, requires_grad=True), one([[0.5]])):
        assert as_float(value) == as_verdict(value).reward == 0.5
    assert as_float(one(True)) == 1.0
    assert (as_bool(one(True)), as_verdict(one(False)).is_success) == (True, False)
    for value in (one([0.5, 0.5]), one([]), one(1j), one(float("nan")), one(float("inf"))):
        assert as_float(value) is None
    assert [v.reward for v in as_verdicts(one([0.25, 0.5]), 2)] == [0.25, 0.5]  # type: ignore[union-attr]


# ------------------------------------------------------------------------------------------------------------- success


@table(
    "reward, success",
    [
        (0.1 + 0.3 * 3, True),
        (sum([0.1] * 10), True),
        (1 - 2**-24, True),  # the float32 below 1
        (float(np.float32(0.1) * np.float32(10)), True),
        (float(np.array([1 / 3] * 3, dtype=np.float32).sum()), True),
        (0.7 + 0.2 + 0.1, True),
        (1 - SUCCESS_TOLERANCE / 2, True),
        (1.0, True),
        (3, True),
        (1 - 2 * SUCCESS_TOLERANCE, False),
        (0.9999, False),
        (0.0, False),
        (-1.0, False),
    ],
)
def test_a_reward_of_1_is_one_whatever_rounding_made_of_it(reward: float, success: bool) -> None:
    assert counts_as_success(reward) is success
    assert JudgeOutput(reward=reward).succeeded is success
    assert Evaluation(score=reward).is_success is success
    assert JudgeOutput(reward=reward, is_success=not success).succeeded is not success
    assert counts_as_success(reward - 0.5, at=0.5) is success


# ------------------------------------------------------------------------------------------------------ in an episode

TOKENIZER = make_tokenizer()
CODE = """
import functools
import numpy as np
from astuner import Judge, JudgeOutput, Workflow, WorkflowOutput
from astuner.contracts.judge import GroupJudge

class Flow(Workflow):
    async def execute(self, workflow_task, model_tuner):
        await model_tuner.chat([{"role": "user", "content": "hi"}])
        return WorkflowOutput(metadata={"n": np.int64(3), "all": np.arange(2)}, metrics={"m": np.float32(0.5)})

class Own(Flow):
    async def execute(self, workflow_task, model_tuner):
        await model_tuner.chat([{"role": "user", "content": "hi"}])
        return VALUE

class Plain(Judge):
    def judge(self, workflow_task, output):
        return VALUE

class Later(Judge):
    async def judge(self, workflow_task, output):
        return VALUE

class Group(GroupJudge):
    def judge_group(self, attempts):
        return [VALUE for _ in attempts]

class Seeds:
    def compute_reward(self, workflow_task, output):
        return VALUE

class Wrapped(Judge):
    def __init__(self):
        self.judge = functools.partial(self.value, None)
    def value(self, _, workflow_task, output):
        return VALUE
    def judge(self, workflow_task, output):
        raise NotImplementedError

def response(task, response):
    return VALUE
"""
JUDGES = ("Plain", "Later", "Group", "Seeds", "Wrapped", "response")


def play(folder: Path, value: str, judge: str) -> Episode:
    (folder / "mine.py").write_text(CODE.replace("VALUE", value))
    given = ["workflow=mine.py->Own"] if judge == "Own" else ["workflow=mine.py->Flow", "max_retries=0"]
    overrides = [f"astuner.rollout.{key}" for key in given]
    if judge != "Own":
        overrides.append(f"astuner.task_judge.judge=mine.py->{judge}")
    runner = EpisodeRunner(fake_config(folder, "  rollout: {compute_madness_checklist: []}\n", overrides))
    models = one_model(FakeEngine(["a"] * 2, TOKENIZER), ChatCodec(TOKENIZER))
    pool = RolloutPool(
        lambda one: runner.run(one, models, SamplingParams(max_tokens=9)),
        max_parallel=1,
        judge_group=runner.judge_group,
    )
    group = asyncio.run(pool.run_group(("g", Task(task_id="t", main_query="hi")), repeat=1, split=Split.TRAIN))
    return group.episodes[0]


@table("judge", [*JUDGES, "Own"])
def test_a_judge_and_a_workflow_may_return_a_number_of_numpys(tmp_path: Path, judge: str) -> None:
    episode = play(tmp_path, "np.array([1, 0]).mean(dtype=np.float32)", judge)
    assert (episode.reward, episode.stop_reason) == (0.5, StopReason.COMPLETED), episode.error


@table("value", ["float('nan')", "(0.5, 0.5, 0.5)", "10**400", "'0.5'", "1j", "np.zeros(9999)", "(0.5, 'yes')"])
def test_the_line_and_the_value_of_what_is_refused_are_named(tmp_path: Path, value: str) -> None:
    workflow = () if value == "'0.5'" else ("Own",)  # a text is the workflow's response
    for judge in (*JUDGES, *workflow):
        folder = tmp_path / judge
        folder.mkdir()
        episode = play(folder, value, judge)
        failed = StopReason.WORKFLOW_FAILED if judge == "Own" else StopReason.JUDGE_FAILED
        assert (episode.reward, episode.stop_reason) == (None, failed)
        assert f"{folder / 'mine.py'}:" in episode.error, (judge, episode.error)
        assert any(shown in episode.error for shown in (value, "yes", repr(eval(value, {"np": np}))[:40])), (
            episode.error
        )
        assert len(episode.error) < 2 * LONGEST_VALUE + len(str(folder)) + 100
