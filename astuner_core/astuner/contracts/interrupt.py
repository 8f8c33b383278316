"""Ctrl-C, in order: the first asks the run to end after what it is doing, the second ends it at once.

While episodes run, the first one cancels them; while weights are being updated, it waits, so that an update is
never half done.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeAlias

_Handler: TypeAlias = Callable[[int, FrameType | None], object] | int | None
_replaced: dict[int, list[tuple[_Handler, _Handler]]] = {}
"""By signal, the handlers of the `handled` blocks that are active, outermost first, each with the one it replaced."""


@contextmanager
def handled(numbers: Iterable[int], handle: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Handle these signals in this block (in the main thread; elsewhere this does nothing).

    A process that is forked within the block handles them as if the block were not there.
    """
    own = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handle) for number in numbers if own}
    for number, handler in before.items():
        _replaced.setdefault(number, []).append((handle, handler))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: not set by Python
            if (handle, handler) in _replaced.get(number, ()):
                _replaced[number].remove((handle, handler))


def _restore_in_fork() -> None:
    """Undo all `handled` blocks in a forked child: Ctrl-C in a run is for the run, not for its workers."""
    for number, blocks in _replaced.items():
        if blocks and signal.getsignal(number) in [handle for handle, _ in blocks]:
            signal.signal(number, blocks[0][1] or signal.SIG_DFL)
    _replaced.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_restore_in_fork)


class StoppedAtOnce(KeyboardInterrupt):
    """The person pressed Ctrl-C for the second time."""


def let_the_person_stop(error: BaseException) -> None:
    """Raise what user code raised if it is the person's Ctrl-C, and no failure of the code.

    While an `Interrupt` listens, a plain `KeyboardInterrupt` is the code's own, as it is beside the main thread.
    """
    listens = getattr(signal.getsignal(signal.SIGINT), "__func__", None) is Interrupt._handle
    listens |= threading.current_thread() is not threading.main_thread()
    if isinstance(error, StoppedAtOnce if listens else KeyboardInterrupt):
        raise error


class Interrupt:
    """Whether the person asked to stop, and what to do right now; made as ``requested``, the next is the second one."""

    def __init__(self, requested: bool = False) -> None:
        self.requested = requested
        self._now: Callable[[], None] | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle SIGINT and SIGTERM in this block (in the main thread; elsewhere this does nothing)."""
        with handled((signal.SIGINT, signal.SIGTERM), self._handle):
            yield

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
            raise StoppedAtOnce
        os.write(2, b"\nstopping in order, what is finished is saved; Ctrl-C again stops at once\n")
        self.request()

    def request(self) -> None:
        """As the first Ctrl-C, from any thread."""
        self.requested = True
        if self._now is not None:
            self._now()
