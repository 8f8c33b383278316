"""Tell who blocks the event loop, and end it.

A coroutine that does not await keeps the loop to itself: ``time.sleep`` in an ``async def execute`` stops every
episode and every timeout.  So a heart beats on the loop, and a thread listens.  When the beats stop it says which
line holds the loop; when they stop for too long it sends a signal whose handler raises `LoopBlocked` in that line.

Invariant: only the step that the thread saw is interrupted, and only if it is a workflow's or a judge's.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from astuner.contracts.errors import EpisodeError
from astuner.plugins.user_code import is_own
from astuner.rollout.threads import USER_CODE

PATIENCE = 5.0
"""Seconds without a heartbeat before the person is told."""

_DEBUGGERS = {"bdb", "pdb", "pydevd", "_pydevd_bundle"}
_told: set[str] = set()  # each place is named once per process, not once per step


class LoopBlocked(EpisodeError):
    """A workflow or judge kept the event loop to itself for too long; raised in the line that does."""


@contextmanager
def watching(loop: asyncio.AbstractEventLoop, limit_seconds: float, tell: Callable[[str], None]) -> Iterator[None]:
    """Watch ``loop``, which this thread runs in the block.

    :param limit_seconds: for how long one step may hold the loop before it is interrupted. That works in the main
        thread, on systems with SIGALRM; elsewhere the person is told, and nothing more.
    :param tell: gets a sentence for the person; called from a thread beside the loop.
    """
    watch = _Watch(loop, limit_seconds, tell)
    listener = threading.Thread(target=watch.listen, name="astuner watchdog", daemon=True)
    if watch.interrupts:
        watch.handler_before = signal.signal(signal.SIGALRM, watch.handle)
    watch.beat()
    listener.start()
    try:
        yield
    finally:
        watch.over.set()
        watch.timer.cancel()
        listener.join()  # a signal it has sent is handled, and ignored, before the handler changes
        if watch.interrupts:
            signal.signal(signal.SIGALRM, watch.handler_before or signal.SIG_DFL)


class _Watch:
    def __init__(self, loop: asyncio.AbstractEventLoop, limit: float, tell: Callable[[str], None]) -> None:
        self.loop, self.limit, self.tell = loop, limit, tell
        self.patience = min(PATIENCE, limit)
        self.period = self.patience / 4
        self.thread = threading.get_ident()
        self.interrupts = threading.current_thread() is threading.main_thread() and hasattr(signal, "SIGALRM")
        self.handler_before: Any = None
        self.over = threading.Event()
        self.beats = 0
        self.guilty: tuple[int, object] | None = None
        self.story = ""
        self.times = 0

    def beat(self) -> None:
        self.beats += 1
        self.timer = self.loop.call_later(self.period, self.beat)

    def step(self) -> tuple[int, object]:
        """What holds the loop: the same pair is the same step of the same task."""
        return self.beats, asyncio.current_task(self.loop)

    def listen(self) -> None:
        """Look every period, in a thread of its own, whether the loop is still in the same step."""
        seen, held, looked = self.step(), 0.0, time.monotonic()
        while not self.over.wait(self.period):
            before, looked = looked, time.monotonic()
            step = self.step()
            frame = sys._current_frames().get(self.thread)
            if step != seen or step[1] is None or frame is None or _debugged(frame):
                seen, held, self.times = step, 0.0, 0
                continue
            held += min(looked - before, 2 * self.period)  # more has passed only if the whole process was stopped
            if held < self.patience:
                continue
            where = _place(frame)
            self.story = f"{where} blocks the event loop: make `execute` (or `judge`) a plain `def`, or use await"
            if where not in _told and not _imports(frame):  # which is once, and mostly our doing
                _told.add(where)
                self.tell(f"{self.story}; until it goes on, every other episode stands still")
            if held >= self.limit and self.interrupts:
                self.guilty, self.times = step, self.times + 1
                held = self.limit - self.patience  # again, should it go on
                signal.pthread_kill(self.thread, signal.SIGALRM)

    def handle(self, number: int, frame: FrameType | None) -> None:
        """In the main thread, between two instructions of whatever runs there."""
        guilty, self.guilty = self.guilty, None
        if guilty is None:  # somebody else's alarm
            if callable(self.handler_before):
                self.handler_before(number, frame)
        elif guilty == self.step() and USER_CODE.get() and not self.over.is_set():
            if self.times > 1:  # swallowed, by an `except Exception` around a retry for example
                raise asyncio.CancelledError(self.story)
            raise LoopBlocked(self.story)


def _debugged(frame: FrameType) -> bool:
    """Whether a person sits at a breakpoint."""
    return any(str(f.f_globals.get("__name__")).partition(".")[0] in _DEBUGGERS for f in _outward(frame))


def _imports(frame: FrameType) -> bool:
    return any(f.f_code.co_filename.startswith("<frozen importlib") for f in _outward(frame))


def _place(frame: FrameType) -> str:
    """``file:line in function`` of the innermost frame that is neither a library's nor ours."""
    theirs = (f for f in _outward(frame) if is_own(f.f_code.co_filename))
    found = next(theirs, frame)
    return f"{found.f_code.co_filename}:{found.f_lineno} in {found.f_code.co_name}"


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
