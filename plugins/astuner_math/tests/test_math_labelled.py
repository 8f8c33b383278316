"""440 labelled pairs of a reference and an answer, half of which the judge was not tuned on.

The labels were written before the judge was changed.  A fixed hash puts each pair into one half; failures of the
held-out half were counted and never looked at.  The category `reported` has those that a person had named before:
they are in the tuning half whatever their hash.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from astuner import Task, WorkflowOutput, WorkflowTask
from astuner_math.answers import normalise
from astuner_math.judges import MathAnswerAsJudge, MathAnswerConfig
from astuner_math.quantities import quantity
from astuner_math.values import ratio, time_of_day
from tests.table import table

from ._quick import quick_verdict


class Pair(NamedTuple):
    equal: bool
    category: str
    reference: str
    answer: str

    @property
    def is_held_out(self) -> bool:
        """Whether it was never looked at; `reported` ones were."""
        hashed = hashlib.sha256(f"{self.reference}\t{self.answer}".encode()).digest()
        return self.category != "reported" and hashed[0] % 2 == 1


def pairs() -> list[Pair]:
    lines = Path(__file__).with_name("labelled_answers.tsv").read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t") for line in lines if not line.startswith("#")]
    return [Pair(label == "=", category, reference, answer) for label, category, reference, answer in rows]


KNOWN_MISSES = {
    (r"\ln 2", r"\log 2 / \log e"),  # `\log 2 / x` is read as the logarithm of 2/x
    ("30", r"30\%30"),  # math-verify reads the first number
}
"""Of the tuning half."""
HELD_OUT_AGREEMENT = 212 / 215
"""As measured; 190 / 215 before the first change (and 192 / 225 of the tuning half), 211 / 215 after it.

The second change read dates, times, ranges and units as values of their own. Its author saw the misses of both halves.
"""


def test_the_set_is_large_and_both_halves_have_every_label():
    every = pairs()
    assert len({(p.reference, p.answer) for p in every}) == len(every) == 440
    halves = Counter((p.is_held_out, p.equal) for p in every)
    assert min(halves.values()) > 80
    assert len({p.category for p in every if p.is_held_out}) >= 22


@pytest.fixture(scope="module")
def missed() -> set[Pair]:
    """Pairs that the judge does not score as they are labelled."""
    judge = MathAnswerAsJudge(MathAnswerConfig(processes=1))

    async def score(pair: Pair) -> float:
        task = WorkflowTask(task=Task(task_id="t", metadata={"answer": pair.reference}), episode_id="e", group_id="g")
        said = WorkflowOutput(metadata={"final_answer": rf"So it is \boxed{{{pair.answer}}}."})
        return (await judge.judge(task, said)).reward

    async def every() -> set[Pair]:
        scores = await asyncio.gather(*map(score, pairs()))
        return {pair for pair, reward in zip(pairs(), scores, strict=True) if reward != float(pair.equal)}

    found = asyncio.run(every())
    judge.close()
    return found


@pytest.mark.slow
def test_the_tuning_half_is_judged_as_labelled_but_for_the_known_misses(missed):
    assert {(p.reference, p.answer) for p in missed if not p.is_held_out} == KNOWN_MISSES


@pytest.mark.slow
def test_the_held_out_half_is_judged_as_measured(missed):
    held_out = sum(p.is_held_out for p in pairs())
    assert 1 - sum(p.is_held_out for p in missed) / held_out == pytest.approx(HELD_OUT_AGREEMENT)
    assert sum(p.is_held_out and not p.equal for p in missed) <= 2, "wrong answers that were rewarded"


@table(
    ("reference", "answer", "verdict"),
    [
        ("90 minutes", "1 hour 30 minutes", True),
        ("1 hour 30 minutes", "90", True),  # a missing unit is the smallest of them
        ("5 ft 6 in", "66 inches", True),
        ("3:30 PM", "3:30 pm", True),
        ("3:30 PM", "3:30", True),
        ("3:30", "15:30", None),
        ("3:30 PM", "15:03", False),
        ("2:3:5", "4:6:10", True),
        ("2:3:5", "2:5:3", False),
        ("2:3:5", r"\frac{2}{15}", False),
        ("18", r"{\color{red}18}", True),
        ("£5", r"\$5", False),
    ],
)
def test_quick_verdicts(reference, answer, verdict):
    found = quick_verdict(normalise(reference), normalise(answer))
    assert found is verdict if verdict is not None else not found


@table("text", ["1 hour 30", "1 hour 30 hours", "30 minutes 1 hour", "1 hour 5 cm", "1 hour and"])
def test_what_is_no_compound_quantity(text):
    assert quantity(text) is None or quantity(text).unit is None


@table("text", ["25:00", "3:60", "7", "3:30 XM", "0:0", "", "1::2"])
def test_what_is_neither_a_time_nor_a_ratio(text):
    assert time_of_day(text) is None
    assert ratio(text) is None or text in ("25:00", "3:60")
