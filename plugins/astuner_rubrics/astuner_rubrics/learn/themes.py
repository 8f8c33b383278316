"""Criteria merged into a few themes with tips, where a person wants fewer and broader ones.

The helper says which criteria belong together; weights and origins add up.  Invariant: every criterion is in exactly
one theme, so nothing that was learned is lost.
"""

from __future__ import annotations

import functools

from pydantic import BaseModel, model_validator

from astuner_rubrics.fence import EXPLAINED, fenced
from astuner_rubrics.grading import Ask
from astuner_rubrics.rubric_file import Rubric

PROMPT = "themes-1"

_SYSTEM = f"""\
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


async def merge(ask: Ask, rubrics: tuple[Rubric, ...], most: int) -> tuple[Rubric, ...]:
    """The rubrics as at most ``most`` themes; those few enough already stay as they are.

    :raises HelperFailed: the helper gave no usable answer.
    :raises BudgetSpent: the budget does not allow one more request.
    """
    if len(rubrics) <= most:
        return rubrics
    numbered = "\n".join(f"{n}. {r.text}" for n, r in enumerate(rubrics, start=1))
    content = f"{fenced('criteria', numbered)}\n\nSort them into at most {most} themes."
    messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": content}]
    said = await ask(messages, purpose="learn.themes", answer=_form(len(rubrics), most), sample=0)
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
def _form(criteria: int, most: int) -> type[Themes]:
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
