"""When to say that a helper model refuses much, and when to stop since nothing becomes a task.

A helper that is down is one thing (`making.GIVE_UP_AFTER`); one that answers and refuses, or whose proposals all fail
their checks, is another: single refusals stop nothing, and only a start that has brought no task at all ends.
Invariant: a folder that has a task is never stopped from here, and every start may try as often as the first.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from astuner.contracts.errors import DataError
from astuner_flywheel.generation.standing import Standing

TRIES = 20
"""Proposals and requests that come to nothing, in one start, before a generation without any task stops."""
WINDOW, MANY = 20, 10
"""So many refusals among the last requests are said, once."""
_EXAMPLES = 2


class NothingAccepted(DataError):
    """Of all that was proposed nothing became a task."""


class Luck:
    """What became of one start's requests and proposals.

    :param tell: is given what a person should know, once.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._recent: deque[bool] = deque(maxlen=WINDOW)
        self._reasons: Counter[str] = Counter()
        self._examples: list[str] = []
        self.told = ""
        """What was said of refusals; empty while nothing was."""

    def answered(self, refusal: str = "") -> None:
        """The helper answered a request, or (with why) would not."""
        self._recent.append(bool(refusal))
        if refusal and len(self._examples) < _EXAMPLES and refusal not in self._examples:
            self._examples.append(refusal)
        refused = sum(self._recent)
        if not self.told and refused >= MANY and len(self._recent) == WINDOW:
            self.told = (
                f"the helper would not answer {refused} of the last {WINDOW} requests, and the others go on; "
                f"for example: {'; '.join(self._examples)}"
            )
            self._tell(self.told)

    def in_vain(self, reason: str, example: str) -> None:
        """A proposal, or a request, that came to nothing."""
        self._reasons[reason] += 1
        if self._reasons[reason] == 1 and len(self._reasons) <= _EXAMPLES:
            self._examples.append(f"{reason}: {example}"[:300])

    def give_up(self, standing: Standing, *, left: bool) -> None:
        """Called when nothing is under way.

        :param left: whether there is more to ask.
        :raises NothingAccepted: there is no task after all these tries.
        """
        tries = sum(self._reasons.values())
        if standing.accepted or (left and tries < TRIES):
            return
        what = f"the {tries} tries of this start" if tries else "all that was asked so far"
        counted = (self._reasons or standing.rejected).most_common()
        counts = ", ".join(f"{count} {reason}" for reason, count in counted) or "nothing was proposed"
        examples = f". For example: {'; '.join(self._examples)}" if self._examples else ""
        help_ = "Another helper model, other instructions or other documents may help"
        further = f"the same command tries up to {TRIES} more" if left else "nothing is left to ask: raise rounds too"
        raise NothingAccepted(f"no task came of {what}: {counts}{examples}. {help_}; {further}")
