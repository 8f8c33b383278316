"""Ctrl-C, in order: the first asks the run to end after what it is doing, the second ends it at once.

While episodes run, the first one cancels them; while weights are being updated, it waits, so that an update is
never half done.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupt:
    """Whether the person asked to stop, and what to do about it right now."""

    def __init__(self) -> None:
        self.requested = False
        self._now: Callable[[], None] | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle SIGINT and SIGTERM in this block (in the main thread; elsewhere this does nothing)."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {s: signal.signal(s, self._handle) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def cancels(self, cancel: Callable[[], None]) -> Iterator[None]:
        """In this block, an interrupt also calls ``cancel``."""
        self._now = cancel
        try:
            if self.requested:
                cancel()
            yield
        finally:
            self._now = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        os.write(2, b"\nstopping in order, what is finished is saved; Ctrl-C again stops at once\n")
        if self._now is not None:
            self._now()
