"""Handle Ctrl-C: the first one stops the run gracefully, the second one immediately.

The first Ctrl-C cancels running episodes. During a weight update, it takes effect after the update, so that no update
is incomplete.
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
"""Signal -> handlers of the active `handled` blocks, outermost first, each with the handler it replaced."""


@contextmanager
def handled(numbers: Iterable[int], handle: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Handle these signals in this block. In threads other than the main thread, this does nothing.

    A process that is forked within the block restores the previous handlers.
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
    """Undo all `handled` blocks in a forked child: Ctrl-C stops the run, not its workers directly."""
    for number, blocks in _replaced.items():
        if blocks and signal.getsignal(number) in [handle for handle, _ in blocks]:
            signal.signal(number, blocks[0][1] or signal.SIG_DFL)
    _replaced.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_restore_in_fork)


class StoppedAtOnce(KeyboardInterrupt):
    """The user pressed Ctrl-C a second time."""


def let_the_person_stop(error: BaseException) -> None:
    """Reraise an exception from user code if it is the user's Ctrl-C rather than an error of the code.

    While an `Interrupt` listens, and outside the main thread, a plain `KeyboardInterrupt` comes from the code itself.
    """
    listens = getattr(signal.getsignal(signal.SIGINT), "__func__", None) is Interrupt._handle
    listens |= threading.current_thread() is not threading.main_thread()
    if isinstance(error, StoppedAtOnce if listens else KeyboardInterrupt):
        raise error


class Interrupt:
    """State of the user's request to stop.

    :param requested: Whether the first Ctrl-C counts as already pressed.
    """

    def __init__(self, requested: bool = False) -> None:
        self.requested = requested
        self._now: Callable[[], None] | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle SIGINT and SIGTERM in this block. In threads other than the main thread, this does nothing."""
        with handled((signal.SIGINT, signal.SIGTERM), self._handle):
            yield

    @contextmanager
    def cancels(self, cancel: Callable[[], None]) -> Iterator[None]:
        """Call ``cancel`` on an interrupt in this block."""
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
        os.write(2, b"\nStopping and saving finished work. Press Ctrl-C again to stop immediately.\n")
        self.request()

    def request(self) -> None:
        """Request a stop from any thread, like the first Ctrl-C."""
        self.requested = True
        if self._now is not None:
            self._now()
