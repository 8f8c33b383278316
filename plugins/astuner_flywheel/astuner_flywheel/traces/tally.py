"""What became of everything that was read: used, or left out for a reason that is counted.

Invariant: nothing is left out without being counted here, and with ``on_bad: stop`` the first unreadable thing raises.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from astuner.contracts.errors import DataError

OnBad = Literal["stop", "skip"]


@dataclass
class Tally:
    """Counts by reason, each with the first place."""

    on_bad: OnBad = "skip"
    read: Counter[str] = field(default_factory=Counter)
    """What was read, by kind: spans, traces, conversations, lines, feedback."""
    bad: Counter[str] = field(default_factory=Counter)
    """What cannot be read, by reason."""
    dropped: Counter[str] = field(default_factory=Counter)
    """What could be read and was left out, by reason."""
    first: dict[str, str] = field(default_factory=dict)
    """Reason -> where it came up first."""

    def unreadable(self, reason: str, place: str) -> None:
        """
        :raises DataError: with ``on_bad: stop``.
        """
        if self.on_bad == "stop":
            raise DataError(f"{place}: {reason}. Correct it, or leave such out with on_bad_trace: skip")
        self.bad[reason] += 1
        self.first.setdefault(reason, place)

    def drop(self, reason: str, place: str) -> None:
        self.dropped[reason] += 1
        self.first.setdefault(reason, place)

    def report(self) -> dict[str, Any]:
        """As JSON."""

        def reasons(counts: Counter[str]) -> dict[str, Any]:
            return {reason: {"count": n, "first": self.first.get(reason, "")} for reason, n in counts.most_common()}

        return {"read": dict(self.read), "unreadable": reasons(self.bad), "dropped": reasons(self.dropped)}
