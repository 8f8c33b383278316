"""A measured property of a judge, and what it takes to be fit.

Invariant: a number that too few answers stand behind is never called good: it is `unknown`, and says how many it had.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Grade = Literal["good", "care", "bad", "unknown", "info"]

FEWEST = 10
"""Fewer answers than this say nothing."""


@dataclass(frozen=True)
class Limits:
    """From where on a number asks for care, and from where on the judge should not be used."""

    care: float
    bad: float

    @property
    def more_is_better(self) -> bool:
        return self.care > self.bad

    def __str__(self) -> str:
        return f"{'≥' if self.more_is_better else '≤'} {self.care:g}"


@dataclass(frozen=True)
class Measure:
    """One line of the card."""

    name: str
    """In words, for people."""
    key: str
    """For machines."""
    value: float | None
    interval: tuple[float, float] | None
    n: int
    """Verdicts or pairs behind it."""
    limits: Limits | None = None
    """None for what is told and not graded."""
    note: str = ""
    """Why there is no value, where nobody asked for one: ``not measured``."""

    @property
    def grade(self) -> Grade:
        if self.limits is None:
            return "info"
        if self.value is None or self.n < FEWEST:
            return "unknown"
        size = self.value if self.limits.more_is_better else -abs(self.value)
        bad, care = (x if self.limits.more_is_better else -x for x in (self.limits.bad, self.limits.care))
        return "bad" if size < bad else "care" if size < care else "good"


AGREEMENT = Limits(care=0.8, bad=0.65)
FLIPS = Limits(care=0.1, bad=0.3)
LENGTH = Limits(care=0.3, bad=0.6)
PADDING = Limits(care=0.2, bad=0.5)
CONSISTENCY = Limits(care=0.9, bad=0.7)
ATTACKS = Limits(care=0.05, bad=0.3)
ABSTENTIONS = Limits(care=0.05, bad=0.3)
