"""A log sink in a thread of its own, so that a tracker that hangs holds up nobody.

Calls are queued and made in order.  A sink whose call raises, takes longer than `LIMIT`, or that is so slow that
`LONGEST` calls wait, has failed: it gets no more calls, and what is queued is dropped.  A thread cannot be killed, so
that of a sink that hangs is left behind.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

from astuner.contracts.log_sink import LogSink

LIMIT = 120.0
"""Seconds that a call may take: opening a tracker over a network that is down takes up to 90."""
LONGEST = 1000
"""Calls that may wait."""


class SinkThread:
    """One sink, told things without waiting for it."""

    def __init__(self, sink: LogSink, *, limit: float = LIMIT, longest: int = LONGEST) -> None:
        self.sink = sink
        self._limit, self._longest = limit, longest
        self._calls: deque[tuple[str, tuple[Any, ...]]] = deque()
        self._since: float | None = None
        """When the call that is being made began."""
        self._failure = ""
        self._changed = threading.Condition()
        threading.Thread(target=self._work, name=f"astuner-sink-{type(sink).__name__}", daemon=True).start()

    def tell(self, name: str, arguments: tuple[Any, ...]) -> None:
        """Have ``sink.name(*arguments)`` called."""
        with self._changed:
            if self._failure:
                return
            if name == "progress" and self._calls:
                return  # there will be newer progress
            if len(self._calls) >= self._longest:
                self._fail(f"it is too slow: {len(self._calls)} calls wait for it")
                return
            self._calls.append((name, arguments))
            self._changed.notify_all()

    def failure(self) -> str:
        """Why the sink is to be left out; "" while it goes."""
        with self._changed:
            if not self._failure and self._since is not None and time.monotonic() - self._since > self._limit:
                self._fail(f"it did not come back within {self._limit:g} s")
            return self._failure

    def drain(self) -> None:
        """Wait until everything was told, as long as calls come back in time."""
        while not self.failure():
            with self._changed:
                if self._since is None and not self._calls:
                    return
                self._changed.wait(self._left())

    def _left(self) -> float:
        """Seconds until the call that is being made takes too long."""
        return self._limit if self._since is None else max(self._since + self._limit - time.monotonic(), 0.01)

    def _fail(self, why: str) -> None:
        self._failure = why
        self._calls.clear()
        self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._since = None
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._calls or self._failure)
                if self._failure:
                    return
                name, arguments = self._calls.popleft()
                self._since = time.monotonic()
            try:
                getattr(self.sink, name)(*arguments)
            except Exception as e:
                with self._changed:
                    self._fail(f"{type(e).__name__}: {e}")
                return
            if name == "close":
                with self._changed:
                    self._since = None
                    self._changed.notify_all()
                return
