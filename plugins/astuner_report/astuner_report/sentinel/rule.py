"""The interface of a rule: it reads the metrics of one step after another and returns a message if something is wrong.

Invariant: a rule reads only the rows of ``metrics.jsonl``, in order, and settings that are fixed before the run starts.
Its alarms therefore depend on that file alone, and a resumed run continues with the same state.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

Severity = Literal["warning", "error"]
Verdict = str | None
"""A message if something is wrong, an empty string if not, None if the row lacks the metrics that the rule needs."""


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """The metrics of one row, as a rule reads them."""

    step: int
    row: Mapping[str, float | None]
    """The row of ``metrics.jsonl``; None for values that are not finite."""
    policy: str = ""
    """The monitored policy, in runs that train several."""
    max_staleness: int | None = None
    """Largest age of the generating weights in updates, as stated by the backbone; None if it states no bound."""
    grad_clip: float = 1.0
    """`optim.grad_clip` of the run."""

    def get(self, name: str) -> float | None:
        """Return a metric of the step; None if it is missing or not finite."""
        value = self.row.get(name)
        return value if value is not None and math.isfinite(value) else None

    def own(self, name: str) -> float | None:
        """Return a metric of the monitored policy, as `get` does."""
        return self.get(self._own(name))

    def is_broken(self, name: str) -> bool:
        """Return whether the policy's metric is present but not finite."""
        return self._own(name) in self.row and self.own(name) is None

    @property
    def who(self) -> str:
        """Return a phrase that names the policy in a message, or an empty string."""
        return f" of the policy {self.policy}" if self.policy else ""

    def _own(self, name: str) -> str:
        return f"policy/{self.policy}/{name}" if self.policy else name


class Rule(ABC):
    """A condition that indicates a problem. An instance monitors one run, or one policy of it."""

    name: ClassVar[str]
    severity: ClassVar[Severity] = "warning"
    per_policy: ClassVar[bool] = False
    """Whether each policy is monitored separately."""
    advice: ClassVar[str]
    """What to do next, without the final period."""
    explains: ClassVar[tuple[str, ...]] = ()
    """Rules whose alarms follow from this one and are suppressed while it holds."""

    @abstractmethod
    def see(self, facts: StepFacts) -> Verdict:
        """Return the verdict on the next training step."""

    def validated(self, facts: StepFacts) -> Verdict:
        """Return the verdict on the next validation."""
        return None
