"""Redirect the output of a third-party trainer and of Ray to a file; the terminal shows only the run's own lines.

A trainer prints warnings, a progress bar and messages of its libraries, and Ray repeats the output of its workers.  The
log file keeps all of it for debugging.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import IO, Any


class Redirect:
    """Send the main thread's output to a file, except inside `ours`, and that of Ray's threads always."""

    def __init__(self, log: Path) -> None:
        """:param log: Opened for appending, so that a resumed run keeps earlier output."""
        self.log = log
        self._theirs = False

    @contextmanager
    def theirs(self) -> Iterator[None]:
        """Redirect output while the trainer's code runs."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("a", encoding="utf-8", buffering=1) as file:
            out, err = _Fork(sys.stdout, file, self), _Fork(sys.stderr, file, self)
            with redirect_stdout(out), redirect_stderr(err):
                self._theirs = True
                try:
                    yield
                finally:
                    self._theirs = False

    @contextmanager
    def ours(self) -> Iterator[None]:
        """Restore the terminal while the run's code runs inside the trainer's."""
        before, self._theirs = self._theirs, False
        try:
            yield
        finally:
            self._theirs = before

    def takes(self) -> bool:
        """Return whether output of the calling thread belongs to the trainer or Ray."""
        thread = threading.current_thread()
        return (self._theirs and thread is threading.main_thread()) or thread.name.startswith("ray")


class _Fork:
    """Text stream that writes to one of two others."""

    def __init__(self, terminal: IO[str], file: IO[str], redirect: Redirect) -> None:
        self._terminal, self._file, self._redirect = terminal, file, redirect

    def write(self, text: str) -> int:
        if self._file.closed:  # the trainer kept a reference, e.g. a progress bar that ends when it is collected
            with self._redirect.log.open("a", encoding="utf-8") as file:
                return file.write(text)
        return (self._file if self._redirect.takes() else self._terminal).write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._terminal, name)
