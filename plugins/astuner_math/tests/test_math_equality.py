"""Answers are compared as mathematics: the labelled cases, and that plain numbers need no process."""

from __future__ import annotations

import asyncio
from collections import Counter
from concurrent.futures import Future
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astuner import JudgeOutput, Task, WorkflowOutput, WorkflowTask
from astuner_math.answers import normalise
from astuner_math.judges import MathAnswerAsJudge, MathAnswerConfig
from astuner_math.limited import LimitedEquality
from astuner_math.quantities import quantity

from ._quick import quick_verdict


def cases() -> list[tuple[bool, str, str, str]]:
    lines = Path(__file__).with_name("equality_cases.tsv").read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t") for line in lines if not line.startswith("#")]
    return [(verdict == "=", category, reference, candidate) for verdict, category, reference, candidate in rows]


def attempt(reference: str, text: str) -> tuple[WorkflowTask, WorkflowOutput]:
    task = Task(task_id="t1", main_query="?", metadata={"answer": reference})
    return WorkflowTask(task=task, episode_id="e", group_id="g"), WorkflowOutput(metadata={"final_answer": text})


@pytest.fixture(scope="module")
def judge():
    judge = MathAnswerAsJudge(MathAnswerConfig(processes=1))
    yield judge
    judge.close()


def ask(judge: MathAnswerAsJudge, reference: str, text: str) -> JudgeOutput:
    return asyncio.run(judge.judge(*attempt(reference, text)))


def test_the_labelled_set_is_balanced_and_covers_every_category():
    labelled = cases()
    assert len(labelled) >= 120
    both = Counter((category, equal) for equal, category, _, _ in labelled)
    categories = {category for _, category, _, _ in labelled}
    assert {"thousands", "fraction", "percent", "unit", "money", "degrees", "latex", "set", "interval"} <= categories
    assert all(both[category, True] and both[category, False] for category in categories)


@pytest.mark.slow
@pytest.mark.parametrize(("equal", "category", "reference", "candidate"), cases())
def test_labelled_case(judge, equal, category, reference, candidate):
    assert ask(judge, reference, rf"So the answer is \boxed{{{candidate}}}.").reward == float(equal)


def test_equality_of_the_parent_agrees_with_the_child(judge):
    """What the quick way decides about plain integers and fractions, math-verify decides alike."""
    compared = 0
    for equal, category, reference, candidate in cases():
        a, b = normalise(reference), normalise(candidate)
        if category in ("integer", "fraction") and quick_verdict(a, b) is not None and " 1/2" not in b:
            assert judge.equality.submit(a, b).result().equal == equal, (reference, candidate)
            compared += 1
    assert compared > 15


DRESSES = ["{}", "${}$", r"\({}\)", r"{} \text{{ apples}}", r" {} . "]


@given(st.fractions(max_denominator=1000), st.sampled_from(DRESSES))
def test_a_number_equals_itself_however_it_is_set(value: Fraction, dress: str):
    sign = "-" if value < 0 else ""
    tex = dress.format(rf"{sign}\dfrac{{{abs(value.numerator)}}}{{{value.denominator}}}")
    assert quick_verdict(normalise(f"{value.numerator}/{value.denominator}"), normalise(tex)) is True


@given(st.integers(), st.integers())
def test_two_integers_are_equal_only_if_they_are_the_same(a: int, b: int):
    assert quick_verdict(normalise(f"{a:,}"), normalise(str(b))) is (a == b)


@given(st.text(max_size=60))
def test_any_text_can_be_normalised_and_read(text: str):
    tidy = normalise(text)
    read = quantity(tidy)
    assert read is None or isinstance(read.value, Fraction)
    assert normalise(tidy) == normalise(normalise(tidy))


def test_plain_numbers_start_no_process(monkeypatch):
    def refuse(self: LimitedEquality, reference: str, candidate: str) -> Future:
        raise AssertionError(f"a process was asked about {reference!r} and {candidate!r}")

    monkeypatch.setattr(LimitedEquality, "submit", refuse)
    judge = MathAnswerAsJudge()
    for candidate, reward in [("72", 1.0), ("71", 0.0), (r"\$72.00", 1.0), ("7,200", 0.0), (r"\frac{144}{2}", 1.0)]:
        assert ask(judge, "48/2=24\n#### 72", rf"\boxed{{{candidate}}}").reward == reward
    assert ask(judge, "72", "no box").reward == 0.0
    judge.close()
