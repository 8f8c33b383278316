"""How many instances may exist at once, and who waits for the next one.

First come, first served.  Invariant: at most `size` slots are taken; one that is given to a waiter who has meanwhile
gone away goes to the next.
"""

from __future__ import annotations

import asyncio
from collections import deque

from astuner_env.manager.refusal import Refusal

RETRY_AFTER = 5
"""Seconds after which a client that found no slot may ask again."""
LONGEST_QUEUE = 1024


class Slots:
    """A counted number of places with a queue before them; for one event loop."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def take(self, patience: float, *, first: bool = False) -> None:
        """Wait for a slot.

        :param patience: seconds to wait.
        :param first: before all others: the caller has just given one up.
        :raises Refusal: busy; none became free, or too many wait already.
        """
        if self.taken < self.size and not self._waiting:
            self.taken += 1
            return
        if len(self._waiting) >= LONGEST_QUEUE:
            raise self._busy(f"and {LONGEST_QUEUE} requests wait for one")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.appendleft(turn) if first else self._waiting.append(turn)
        try:
            await asyncio.wait({turn}, timeout=patience)
        except asyncio.CancelledError:
            if turn.done():
                self.give_back()
            else:
                self._waiting.remove(turn)
            raise
        if not turn.done():
            self._waiting.remove(turn)
            raise self._busy(f"and none became free within {patience:g} s")

    def give_back(self) -> None:
        """A slot is free: the next waiter has it."""
        if self._waiting:
            self._waiting.popleft().set_result(None)
        else:
            self.taken -= 1

    def _busy(self, why: str) -> Refusal:
        return Refusal(
            "busy",
            f"all {self.size} instances are taken, {why}; ask again later, or start the service with a larger "
            "--max-instances",
            retry_after=RETRY_AFTER,
        )
