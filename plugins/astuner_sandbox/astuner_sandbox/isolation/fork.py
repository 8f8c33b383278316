"""A child of a zygote, as the server sees it."""

from __future__ import annotations

import logging
import signal
import socket
import threading
from collections.abc import Callable


class Fork:
    """A child of a zygote; made by `Zygote.fork`."""

    def __init__(
        self, kill: Callable[[], object], pid: int, sock: socket.socket, on_exit: Callable[[Fork], None] | None
    ) -> None:
        self.pid = pid
        self.socket = sock
        """Connected to the child, not inherited by other processes; whoever asked for the fork closes it."""
        self.ended: str | None = None
        """How it ended, for people: ``exit code 1``, ``killed by SIGKILL (out of memory?)``. None: it runs."""
        self.returncode: int | None = None
        """The exit code, or minus the signal's number; None while it runs, or when its zygote ended with it."""
        self.cpu_s = 0.0
        """CPU seconds that it used, known when it has ended."""
        self.peak_mb = 0.0
        """The most memory it had in use, in MiB, pages that it shares with the zygote included; as `cpu_s`."""
        self._kill, self._on_exit, self._killed = kill, on_exit, False
        self._end = threading.Event()

    def kill(self) -> None:
        """Kill it and its process group; harmless when it has ended. `ended` follows when it is really gone."""
        if self.ended is None:
            self._killed = True
            self._kill()

    def wait(self, timeout: float | None = None) -> str | None:
        """Wait for its end: `ended`, None when ``timeout`` seconds have passed."""
        self._end.wait(timeout)
        return self.ended

    def _has_ended(self, how: str) -> None:
        self.ended = "killed" if self._killed and self.returncode == -signal.SIGKILL else how
        self._end.set()
        if self._on_exit is not None:
            try:
                self._on_exit(self)
            except Exception:  # a caller's mistake must not end the thread that everybody waits for
                logging.getLogger(__name__).exception("on_exit of process %d failed", self.pid)
