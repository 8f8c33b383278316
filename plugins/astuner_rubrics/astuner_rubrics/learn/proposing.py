"""Criteria from one example: proposed with its label in view, kept if they give that label without it.

The helper that proposes sees the label, the helper that grades does not; criteria that only repeat the label (the
second answer is better) fail there, since the answers then stand the other way round.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import BaseModel, Field, field_validator

from astuner_rubrics.agreement import Rule
from astuner_rubrics.fence import EXPLAINED, fences
from astuner_rubrics.grading import Ask, Grader, Messages, overall, shown_order
from astuner_rubrics.labels import Mode, Sample, plain

PROMPT = "propose-1"
MAX_LENGTH = 500
"""Characters of a criterion."""

_SYSTEM = f"""\
You find out by which criteria somebody judges answers, from one of their verdicts.

Name criteria that explain the verdict and would judge answers to other questions the same way. A criterion is one \
sentence that says what a good answer does, in words that somebody can apply who sees only a question and an answer: \
no names, numbers or facts of this example, nothing about the place or the label of an answer, and nothing that cannot \
be checked by reading. Each criterion names one thing, and no two name the same. Its weight, 1 to 5, is how much it \
counts beside the others for this person.

{EXPLAINED}

Answer with one JSON object: {{"criteria": [{{"criterion": "…", "weight": 3}}, …]}}."""


class ProposedCriterion(BaseModel):
    """One criterion, and how much it counts."""

    criterion: str
    weight: float = Field(ge=1, le=5)

    @field_validator("criterion")
    @classmethod
    def _is_a_sentence(cls, text: str) -> str:
        if not plain(text) or len(text) > MAX_LENGTH:
            raise ValueError(f"a criterion is one sentence of at most {MAX_LENGTH} characters, not {text[:40]!r}")
        return plain(text)


class Proposed(BaseModel):
    """What the helper proposes."""

    criteria: list[ProposedCriterion] = Field(min_length=1)


@dataclass(frozen=True)
class Found:
    """What became of one example."""

    sample: Sample
    criteria: tuple[str, ...]
    """Those that give the example its label, the helper weighing them; empty where none did."""
    epochs: int
    """Revisions that it took."""


async def find_criteria(
    ask: Ask, grader: Grader, rule: Rule, sample: Sample, *, proposals: int, max_epochs: int
) -> Found:
    """Propose, grade, validate, and revise until the criteria give the example its label.

    :raises HelperFailed: the helper gave no usable answer.
    :raises BudgetSpent: the budget does not allow one more request.
    """
    order = shown_order(sample.question, sample.answers, 0)
    messages = _proposing(sample, order, rule, proposals)
    for epoch in range(max_epochs + 1):
        said = await ask(messages, purpose="learn.propose", answer=Proposed, sample=epoch)
        assert isinstance(said, Proposed)
        weights = {one.criterion: one.weight for one in said.criteria[:proposals]}
        criteria = tuple(weights)
        grades = await grader.grade(sample.question, sample.answers, criteria, purpose="learn.validate", vote=1)
        verdict = overall(grades, list(weights.values()))
        if rule.is_right(sample.worth, verdict):
            return Found(sample, criteria, epoch)
        messages = _revising(sample, order, rule, proposals, criteria, verdict)
    return Found(sample, (), max_epochs)


def _proposing(sample: Sample, order: Sequence[int], rule: Rule, proposals: int) -> Messages:
    wanted = "one criterion" if proposals == 1 else f"at most {proposals} criteria"
    verdict = label(sample, order, rule)
    content = f"{_example(sample, order)}\n\nTheir verdict: {verdict}\nName {wanted} that explain it."
    return [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": content}]


def _revising(
    sample: Sample, order: Sequence[int], rule: Rule, proposals: int, criteria: Sequence[str], verdict: Sequence[float]
) -> Messages:
    """The question again, with what the criteria gave: expected against got."""
    numbered = "\n".join(f"{n}. {text}" for n, text in enumerate(criteria, start=1))
    wanted = "one criterion" if proposals == 1 else f"at most {proposals} criteria"
    content = (
        f"{_example(sample, order, {'criteria so far': numbered})}\n\n"
        f"Their verdict: {label(sample, order, rule)}\n"
        f"Judged by the criteria so far alone, the answers got: {got(verdict, order, rule)}\n"
        f"That is not their verdict. Name {wanted} that explain it, better than those so far."
    )
    return [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": content}]


def _example(sample: Sample, order: Sequence[int], more: dict[str, str] | None = None) -> str:
    texts = {"question": sample.question}
    texts |= {f"answer {n}": sample.answers[i] for n, i in enumerate(order, start=1)}
    return fences(texts | (more or {}))


def label(sample: Sample, order: Sequence[int], rule: Rule) -> str:
    """The label in words, about the answers as they are shown."""
    if rule.mode is Mode.POINTWISE:
        return f"ANSWER 1 gets {sample.worth[0]:g} on a scale from {rule.low:g} (worst) to {rule.high:g} (best)."
    return f"{_in_order([sample.worth[i] for i in order], 0.0)}."


def got(verdict: Sequence[float], order: Sequence[int], rule: Rule) -> str:
    """A verdict in words."""
    if rule.mode is Mode.POINTWISE:
        return f"ANSWER 1 {verdict[0]:.3g}."
    return f"{_in_order([verdict[i] for i in order], rule.near)}."


def _in_order(numbers: Sequence[float], tie: float) -> str:
    """``ANSWER 2 is better than ANSWER 1``, best first."""
    places = sorted(range(len(numbers)), key=lambda i: -numbers[i])
    text = f"ANSWER {places[0] + 1}"
    for before, place in itertools.pairwise(places):
        same = numbers[before] - numbers[place] <= tie
        text += f" {'is as good as' if same else 'is better than'} ANSWER {place + 1}"
        text += ", which" if place != places[-1] else ""
    return text
