"""Grade answers by given criteria with a helper model.

Learning and judging send the same questions, so a measured agreement applies to the judge. Each criterion is graded
separately, and a verdict is the weighted mean, which makes verdicts explainable and weights meaningful. Every vote
shows the answers in a different order, alternating with the reverse order, so that a preference for the first place
cancels out.

Invariant: there is a grade within the scale for every criterion and answer, or `HelperFailed` is raised.
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
"""Version of the prompt, recorded in rubric files."""
AT_ONCE = 10
"""Number of criteria graded in one request."""

Messages = list[dict[str, str]]
Matrix = tuple[tuple[float, ...], ...]
"""Grades by criterion and answer."""


class CriterionGrades(BaseModel):
    """How well each answer meets one criterion."""

    criterion: int
    reason: str
    grades: list[float]


class Grades(BaseModel):
    """What the helper answers."""

    grades: list[CriterionGrades]


Ask = Callable[..., Awaitable[Any]]
"""Ask a helper model like `astuner_helpers.Helper.ask`, and return the ``data`` of its answer."""


@dataclass(frozen=True)
class Grader:
    """Grade answers by criteria on one scale."""

    ask: Ask
    low: float
    high: float

    async def grade(
        self, question: str, answers: Sequence[str], criteria: Sequence[str], *, purpose: str, vote: int = 0
    ) -> Matrix:
        """Return one grade per criterion and answer. Every ten criteria take one request.

        :param vote: Vote number (0, 1, 2, …). Each vote is a separate request with the answers in another order.
        :raises HelperFailed: There are no grades.
        :raises BudgetSpent: The budget does not allow another request.
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
        """Return the messages of a request."""
        numbered = "\n".join(f"{n}. {text}" for n, text in enumerate(criteria, start=1))
        texts = {"criteria": numbered, "question": question}
        texts |= {f"answer {n}": text for n, text in enumerate(answers, start=1)}
        scale = f"The scale goes from {self.low:g} (does not meet it at all) to {self.high:g} (meets it entirely)."
        return [
            {"role": "system", "content": prompt("grade")},
            {"role": "user", "content": f"{fences(texts)}\n\n{scale}"},
        ]


def shown_order(question: str, answers: Sequence[str], vote: int) -> list[int]:
    """Return the order in which a vote shows the answers: pseudo-random, and reversed for every second vote."""
    order = list(range(len(answers)))
    by_content = sorted(order, key=lambda i: digest([question, answers[i]]))
    random.Random(vote // 2).shuffle(by_content)
    return by_content[::-1] if vote % 2 else by_content


def median_of(votes: Sequence[Matrix]) -> Matrix:
    """Return the median grade over votes, which fewer than half of the votes cannot move far.

    An unreliable helper model is sometimes wrong by the full scale, which would distort a mean.
    """
    return tuple(
        tuple(statistics.median(grades) for grades in zip(*rows, strict=True)) for rows in zip(*votes, strict=True)
    )


def overall(matrix: Matrix, weights: Sequence[float]) -> tuple[float, ...]:
    """Return the weighted mean of each answer's grades."""
    total = math.fsum(weights)
    columns = zip(*matrix, strict=True)
    return tuple(math.fsum(w * g for w, g in zip(weights, c, strict=True)) / total for c in columns)


def with_ties(totals: Sequence[float], tie: float) -> tuple[float, ...]:
    """Return the totals, with the mean for answers that tie.

    Starting with the best answer, all answers at most ``tie`` below it tie. The next answer starts a new tie, so a
    chain of small steps does not become one tie.
    """
    found = list(totals)
    left = sorted(range(len(totals)), key=lambda i: -totals[i])
    while left:
        run = [i for i in left if totals[left[0]] - totals[i] <= tie + 1e-9]  # same tolerance as `Rule`
        mean = math.fsum(totals[i] for i in run) / len(run)
        for i in run:
            found[i] = mean
        left = left[len(run) :]
    return tuple(found)


@functools.lru_cache(maxsize=512)
def _form(criteria: int, answers: int, low: float, high: float) -> type[Grades]:
    """Return `Grades` that must be complete and within the scale. Other answers are requested again."""

    class Complete(Grades):
        grades: list[CriterionGrades] = Field(description=f"{criteria} entries, each with {answers} grades")

        @model_validator(mode="after")
        def _is_complete(self) -> Complete:
            numbers = [row.criterion for row in self.grades]
            if numbers != list(range(1, criteria + 1)):
                raise ValueError(f"grades for criteria 1 to {criteria} are required, each once, not {numbers[:12]}")
            for row in self.grades:
                if len(row.grades) != answers:
                    raise ValueError(f"criterion {row.criterion} has {len(row.grades)} grades for {answers} answers")
                if not all(low <= grade <= high for grade in row.grades):  # also rejects NaN
                    scale = f"the scale is {low:g} to {high:g}"
                    raise ValueError(f"{scale}, but criterion {row.criterion} has grades {row.grades[:12]}")
            return self

    Complete.__name__ = "Grades"
    return Complete
