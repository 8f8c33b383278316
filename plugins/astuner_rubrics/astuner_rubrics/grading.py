"""Asking a helper model to grade answers by given criteria, and by nothing else.

The same question is asked while rubrics are learned and when they judge, so an agreement that was measured then is one
of the judge now.  Each criterion is graded on its own, and a verdict is the weighted mean: what moved it can be seen,
and a weight means what it says.  Answers stand in another order for every vote, forwards and backwards in turn, so
that a liking for the first place cancels out.

Invariant: a grade for every criterion and answer, within the scale, or `HelperFailed`.
"""

from __future__ import annotations

import functools
import math
import random
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, Field, model_validator

from astuner_rubrics.fence import fences, prompt
from astuner_rubrics.labels import digest

PROMPT = "grade-1"
"""The version of the prompt; it goes into rubric files."""
AT_ONCE = 10
"""Criteria that are graded in one request."""

Messages = list[dict[str, str]]
Matrix = tuple[tuple[float, ...], ...]
"""criterion -> answer -> grade"""


class CriterionGrades(BaseModel):
    """How well each answer meets one criterion."""

    criterion: int
    reason: str
    grades: list[float]


class Grades(BaseModel):
    """What the helper answers."""

    grades: list[CriterionGrades]


Ask = Callable[..., Awaitable[Any]]
"""Asks a helper model, as `astuner_helpers.Helper.ask` does; the answer's ``data``."""


@dataclass(frozen=True)
class Grader:
    """Grades by criteria on one scale."""

    ask: Ask
    low: float
    high: float

    async def grade(
        self, question: str, answers: Sequence[str], criteria: Sequence[str], *, purpose: str, vote: int = 0
    ) -> Matrix:
        """One grade for each criterion and answer, in one request for every ten criteria.

        :param vote: 0, 1, 2, …: asked again on purpose, with the answers in another order.
        :raises HelperFailed: there are none.
        :raises BudgetSpent: the budget does not allow one more request.
        """
        order = shown_order(question, answers, vote)
        shown = [answers[i] for i in order]
        found: list[tuple[float, ...]] = []
        for start in range(0, len(criteria), AT_ONCE):
            part = criteria[start : start + AT_ONCE]
            messages = self.messages(question, shown, part)
            form = _form(len(part), len(answers), self.low, self.high)
            said = await self.ask(messages, purpose=purpose, answer=form, sample=vote)
            found += [tuple(g for _, g in sorted(zip(order, row.grades, strict=True))) for row in said.grades]
        return tuple(found)

    def messages(self, question: str, answers: Sequence[str], criteria: Sequence[str]) -> Messages:
        """What is asked."""
        numbered = "\n".join(f"{n}. {text}" for n, text in enumerate(criteria, start=1))
        texts = {"criteria": numbered, "question": question}
        texts |= {f"answer {n}": text for n, text in enumerate(answers, start=1)}
        scale = f"The scale goes from {self.low:g} (does not meet it at all) to {self.high:g} (meets it entirely)."
        return [
            {"role": "system", "content": prompt("grade")},
            {"role": "user", "content": f"{fences(texts)}\n\n{scale}"},
        ]


def shown_order(question: str, answers: Sequence[str], vote: int) -> list[int]:
    """The order in which a vote shows the answers: one that nobody chose, every second vote the other way round."""
    order = list(range(len(answers)))
    by_content = sorted(order, key=lambda i: digest([question, answers[i]]))
    random.Random(vote // 2).shuffle(by_content)
    return by_content[::-1] if vote % 2 else by_content


def median_of(votes: Sequence[Matrix]) -> Matrix:
    """The median grade over votes: of an odd number, fewer than half that are far off move nothing.

    A helper that errs now and then errs by the whole scale, and a mean would pass on a third of that.
    """
    return tuple(
        tuple(statistics.median(grades) for grades in zip(*rows, strict=True)) for rows in zip(*votes, strict=True)
    )


def overall(matrix: Matrix, weights: Sequence[float]) -> tuple[float, ...]:
    """The weighted mean of each answer's grades."""
    total = math.fsum(weights)
    columns = zip(*matrix, strict=True)
    return tuple(math.fsum(w * g for w, g in zip(weights, c, strict=True)) / total for c in columns)


def with_ties(totals: Sequence[float], tie: float) -> tuple[float, ...]:
    """The totals, where answers that tie have their mean.

    From the best one on: it and those that are at most ``tie`` below it tie, and the next one begins anew, so that a
    chain of small steps does not make one tie of all.
    """
    found = list(totals)
    left = sorted(range(len(totals)), key=lambda i: -totals[i])
    while left:
        run = [i for i in left if totals[left[0]] - totals[i] <= tie + 1e-9]  # as `Rule` counts ties
        mean = math.fsum(totals[i] for i in run) / len(run)
        for i in run:
            found[i] = mean
        left = left[len(run) :]
    return tuple(found)


@functools.lru_cache(maxsize=512)
def _form(criteria: int, answers: int, low: float, high: float) -> type[Grades]:
    """`Grades` that are complete and within the scale: the helper is asked again where they are not."""

    class Complete(Grades):
        grades: list[CriterionGrades] = Field(description=f"{criteria} entries, each with {answers} grades")

        @model_validator(mode="after")
        def _is_complete(self) -> Complete:
            numbers = [row.criterion for row in self.grades]
            if numbers != list(range(1, criteria + 1)):
                raise ValueError(f"criteria 1 to {criteria} are wanted, each once and in order, not {numbers[:12]}")
            for row in self.grades:
                if len(row.grades) != answers:
                    raise ValueError(f"criterion {row.criterion} has {len(row.grades)} grades for {answers} answers")
                if not all(low <= grade <= high for grade in row.grades):  # no number is not either
                    scale = f"the scale goes from {low:g} to {high:g}"
                    raise ValueError(f"{scale}, and criterion {row.criterion} has grades {row.grades[:12]}")
            return self

    Complete.__name__ = "Grades"
    return Complete
