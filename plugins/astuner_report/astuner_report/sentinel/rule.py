"""What a rule is: it looks at one step's numbers after another, and says what is wrong, if anything is.

A rule sees nothing but the rows of ``metrics.jsonl``, in their order, and what the experiment has settled before it
began.  So what it says depends on that file alone, and a run that is resumed goes on exactly where it was.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

Severity = Literal["warning", "error"]
Verdict = str | None
"""What is wrong; empty: nothing is; None: this row does not tell."""


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """A row of numbers as a rule sees it."""

    step: int
    row: Mapping[str, float | None]
    """As in ``metrics.jsonl``; None where a number was not finite."""
    policy: str = ""
    """The policy that is looked at, where the run trains several."""
    max_staleness: int | None = None
    """Updates that the weights which generate may be behind, as the backbone says; None: it does not say."""
    grad_clip: float = 1.0
    """`optim.grad_clip` of the run."""

    def get(self, name: str) -> float | None:
        """A number of the step; None where there is none, or none that is finite."""
        value = self.row.get(name)
        return value if value is not None and math.isfinite(value) else None

    def own(self, name: str) -> float | None:
        """As `get`, of the policy that is looked at."""
        return self.get(self._own(name))

    def is_broken(self, name: str) -> bool:
        """Whether the policy's number is there, and not finite."""
        return self._own(name) in self.row and self.own(name) is None

    @property
    def who(self) -> str:
        """For a message: whose number it is."""
        return f" of the policy {self.policy}" if self.policy else ""

    def _own(self, name: str) -> str:
        return f"policy/{self.policy}/{name}" if self.policy else name


class Rule(ABC):
    """One thing that can go wrong. An instance watches one run, or one policy of it."""

    name: ClassVar[str]
    severity: ClassVar[Severity] = "warning"
    per_policy: ClassVar[bool] = False
    """Whether each policy is watched by itself."""
    advice: ClassVar[str]
    """What to do next: a sentence without its full stop."""
    explains: ClassVar[tuple[str, ...]] = ()
    """Rules whose complaints follow from this one's, so while it holds they are no alarms of their own."""

    @abstractmethod
    def see(self, facts: StepFacts) -> Verdict:
        """Look at the next training step."""

    def validated(self, facts: StepFacts) -> Verdict:
        """Look at the next validation."""
        return None
