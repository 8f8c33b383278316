"""Criteria from one example: proposed with its label in view, kept if they give that label without it.

The helper that proposes sees the label, the helper that grades does not; criteria that only repeat the label (the
second answer is better) fail there, since the answers then stand the other way round.  Where a person wants fewer and
broader ones, criteria are merged into a few themes with tips: the helper says which belong together, weights and
origins add up, and every criterion is in exactly one theme, so nothing that was learned is lost.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import BaseModel, Field, field_validator, model_validator

from astuner_rubrics.agreement import Rule
from astuner_rubrics.fence import EXPLAINED, fenced, fences
from astuner_rubrics.grading import Ask, Grader, Messages, overall, shown_order
from astuner_rubrics.labels import Mode, Sample, plain
from astuner_rubrics.rubric_file import Rubric

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
            return Found(sample, criteria)
        messages = _revising(sample, order, rule, proposals, criteria, verdict)
    return Found(sample, ())


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


THEMES_PROMPT = "themes-1"

_THEMES_SYSTEM = f"""\
You sort criteria for judging answers into themes.

Put together what is about the same quality. For each theme write one sentence that says what a good answer does, and \
tips: short points of what to look at, which keep everything that its criteria say. Add nothing of your own.

{EXPLAINED}

Answer with one JSON object: {{"themes": [{{"theme": "…", "tips": ["…", …], "criteria": [numbers]}}, …]}}, every \
number in exactly one theme."""


class Theme(BaseModel):
    theme: str
    tips: list[str]
    criteria: list[int]


class Themes(BaseModel):
    themes: list[Theme]


async def merge_into_themes(ask: Ask, rubrics: tuple[Rubric, ...], most: int) -> tuple[Rubric, ...]:
    """The rubrics as at most ``most`` themes; those few enough already stay as they are.

    :raises HelperFailed: the helper gave no usable answer.
    :raises BudgetSpent: the budget does not allow one more request.
    """
    if len(rubrics) <= most:
        return rubrics
    numbered = "\n".join(f"{n}. {r.text}" for n, r in enumerate(rubrics, start=1))
    content = f"{fenced('criteria', numbered)}\n\nSort them into at most {most} themes."
    messages = [{"role": "system", "content": _THEMES_SYSTEM}, {"role": "user", "content": content}]
    said = await ask(messages, purpose="learn.themes", answer=_themes_form(len(rubrics), most), sample=0)
    assert isinstance(said, Themes)
    merged = []
    for theme in said.themes:
        parts = [rubrics[n - 1] for n in theme.criteria]
        merged.append(
            Rubric(
                criterion=theme.theme,
                tips=tuple(theme.tips),
                weight=sum(r.weight for r in parts),
                samples=tuple(dict.fromkeys(place for r in parts for place in r.samples)),
            )
        )
    return tuple(merged)


@functools.lru_cache(maxsize=64)
def _themes_form(criteria: int, most: int) -> type[Themes]:
    class Complete(Themes):
        @model_validator(mode="after")
        def _has_all(self) -> Complete:
            numbers = sorted(n for theme in self.themes for n in theme.criteria)
            if numbers != list(range(1, criteria + 1)):
                raise ValueError(f"each of the criteria 1 to {criteria} is in exactly one theme, not {numbers[:20]}")
            if len(self.themes) > most:
                raise ValueError(f"at most {most} themes, not {len(self.themes)}")
            if not all(theme.theme.strip() and theme.criteria for theme in self.themes):
                raise ValueError("a theme has a sentence and at least one criterion")
            return self

    Complete.__name__ = "Themes"
    return Complete
