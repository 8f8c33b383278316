"""Whose turn it is to compute, where several engines share one CPU.

Two engines that step at the same time would share the cores badly: each brings as many threads as there are, and with
small models both wait for Python's one lock more than they compute.  So they take turns, a step each, and a step has
all threads.  Invariant: turns are given in the order in which they were asked for, so nobody waits for more than one
step of each other engine.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """A lock that is fair: `threading.Lock` may give itself back to whoever just had it, for ever."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._line: deque[threading.Lock] = deque()
        """Those who wait, each with a lock that is opened for them; the first has the turn."""

    @contextmanager
    def one(self) -> Iterator[None]:
        """Wait for the turn, and keep it until the block ends."""
        mine = threading.Lock()
        mine.acquire()
        with self._guard:
            self._line.append(mine)
            if len(self._line) == 1:
                mine.release()
        mine.acquire()
        try:
            yield
        finally:
            with self._guard:
                self._line.popleft()
                if self._line:
                    self._line[0].release()
