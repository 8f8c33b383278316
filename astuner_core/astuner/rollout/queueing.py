"""Time limits that do not count how long something queues for limits which ASTuner keeps itself.

A judge with 60 seconds that waits for a helper model's `rpm` is not slow; failing it would ask the same again and make
the queue longer.  So whoever limits somebody's time gives them a `Clock` (by the context variable `CLOCK`), and
whoever lets things queue tells the clocks of all that wait.  Invariant: a clock stands still exactly while something
that was asked under it queues and nothing that was asked under it is under way.  So own work beside a question that
queues is not counted either: nobody can tell whether it waits for the answer.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
import time
from collections.abc import Iterator


class Clock:
    """How long it stood still; may be asked and told from any thread.

    :param outer: the clock of a time limit around this one, which stands still with it.
    """

    def __init__(self, outer: Clock | None = None) -> None:
        self._outer, self._lock = outer, threading.Lock()
        self._queued = self._under_way = 0
        self._since = 0.0
        self._periods: list[tuple[float, float]] = []
        """From when to when it stood still."""

    @property
    def stands(self) -> bool:
        """Whether it stands still now."""
        return self._queued > 0 and not self._under_way

    def stood(self, after: float = 0.0) -> float:
        """Seconds for which it stood still so far.

        :param after: what was before this moment (of `time.perf_counter`) does not count.
        """
        with self._lock:
            total = time.perf_counter() - max(self._since, after) if self.stands else 0.0
            for begin, end in reversed(self._periods):
                if end <= after:
                    break
                total += end - max(begin, after)
            return total

    def change(self, *, queued: int = 0, under_way: int = 0) -> None:
        """So many more (or fewer) things queue and are under way."""
        with self._lock:
            now, stood = time.perf_counter(), self.stands
            self._queued += queued
            self._under_way += under_way
            if stood and not self.stands:
                self._periods.append((self._since, now))
            elif self.stands and not stood:
                self._since = now
        if self._outer is not None:
            self._outer.change(queued=queued, under_way=under_way)


CLOCK: contextvars.ContextVar[Clock | None] = contextvars.ContextVar("astuner_clock", default=None)
"""Of the time limit that holds for what runs here, the tasks and threads it starts included; None: there is none."""


class Waiters:
    """Those who wait for one job, which queues at first: their clocks, and whether anybody is left."""

    def __init__(self) -> None:
        self._lock, self._left = threading.Lock(), threading.Event()
        self._clocks: list[Clock] = []
        self._queued = True

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """The clock that holds here is told of the job, until the block ends."""
        clock = CLOCK.get()
        if clock is None:
            yield
            return
        with self._lock:
            self._clocks.append(clock)
            _tell([clock], self._queued, 1)
        try:
            yield
        finally:
            with self._lock:
                self._clocks.remove(clock)
                _tell([clock], self._queued, -1)

    def begins(self) -> None:
        """It does not queue any more."""
        self._set(False)

    @contextlib.contextmanager
    def queueing(self) -> Iterator[None]:
        """It queues again, until the block ends."""
        self._set(True)
        try:
            yield
        finally:
            self._set(False)

    def leave(self) -> None:
        """Nobody waits any more."""
        self._left.set()

    def left_within(self, seconds: float) -> bool:
        """Sleep, at most until nobody waits any more; whether that is so."""
        return self._left.wait(max(seconds, 0.0))

    def _set(self, queued: bool) -> None:
        with self._lock:
            if queued != self._queued:
                _tell(self._clocks, self._queued, -1)
                _tell(self._clocks, queued, 1)
                self._queued = queued


def _tell(clocks: list[Clock], queued: bool, more: int) -> None:
    for clock in clocks:
        clock.change(queued=more if queued else 0, under_way=0 if queued else more)
