"""A closed terminal, a plain kill and Ctrl-C end a command in good order, so that what it started does not stay behind.

Python runs a signal's handler between two of its own instructions.  A signal that comes just before a line is waited
for is therefore handled after that line has come, which may be never.  Invariant: here it is handled at once (a thread
hears of it and wakes the waiting one up).
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

NUDGE_EVERY = 0.1
"""Seconds."""
ENDINGS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


class Endings:
    """The first signal that asks to end becomes an exception in the main thread; what follows is ignored."""

    def __init__(self) -> None:
        self.handled = threading.Event()

    def handle(self, number: int, _: object = None) -> None:
        """What Python calls for a signal.

        :raises KeyboardInterrupt: for Ctrl-C.
        :raises SystemExit: for the others, with the code that shells show for a program ended by them.
        """
        if self.handled.is_set():
            return  # what was begun is being put away
        self.handled.set()
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)


@contextmanager
def ended_by_signals() -> Iterator[Endings]:
    """Handle the signals that ask to end for as long as the block runs; in the main thread."""
    endings = Endings()

    def nudge() -> None:
        while told_of := os.read(heard, 1):  # nothing is read when the other end is closed
            while told_of[0] in before and not endings.handled.wait(NUDGE_EVERY):
                signal.pthread_kill(threading.main_thread().ident or 0, told_of[0])

    heard, told = os.pipe()
    os.set_blocking(told, False)
    before = {number: signal.signal(number, endings.handle) for number in ENDINGS}
    other = signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    watching = threading.Thread(target=nudge, name="astuner-signals", daemon=True)
    watching.start()
    try:
        yield endings
    finally:
        endings.handled.set()
        signal.set_wakeup_fd(other)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(told)
        watching.join()
        os.close(heard)
