"""Which tokens the slots hold, and how much of a new prompt is already there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


def common_prefix(a: Sequence[int], b: Sequence[int], limit: int) -> int:
    """Length of the longest common prefix, at most `limit`; bisection over slice comparisons, which run in C."""
    low, high = 0, min(len(a), len(b), limit)
    if a[:high] == b[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass
class Slot:
    """A row of the cache as the scheduler knows it."""

    index: int
    tokens: list[int] = field(default_factory=list)
    valid: int = 0
    """Keys of `tokens[:valid]` are in the cache."""
    session: str = ""
    """Whose conversation it is; empty for calls without a session."""
    busy: bool = False
    """Whether a request is running in it."""
    last_used: int = 0

    def shared(self, prompt: Sequence[int]) -> int:
        """How many leading tokens of `prompt` have their keys here; the last token is always computed anew."""
        return common_prefix(self.tokens, prompt, min(self.valid, len(prompt) - 1))

    def forget(self) -> None:
        self.tokens, self.valid, self.session = [], 0, ""


def find_own(free: Iterable[Slot], session: str, prompt: Sequence[int]) -> Slot | None:
    """The free slot of this conversation; without a session, the longest anonymous one that the prompt extends."""
    if session:
        return next((slot for slot in free if slot.session == session), None)
    extended = (slot for slot in free if slot.valid and not slot.session and slot.shared(prompt) == slot.valid)
    return max(extended, key=lambda slot: slot.valid, default=None)
