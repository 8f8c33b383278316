"""What somebody else's trainer and Ray print goes to a file; the terminal is for the run's own lines.

A trainer prints warnings, a progress bar and whatever its libraries say, and Ray repeats what its workers say.  All of
it is worth keeping, none of it worth reading while things go well.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import IO, Any


class Redirect:
    """Sends the main thread's output to a file, except while `ours` holds; Ray's threads' always."""

    def __init__(self, log: Path) -> None:
        """:param log: appended to, so that a resumed run keeps what was said before."""
        self.log = log
        self._theirs = False

    @contextmanager
    def theirs(self) -> Iterator[None]:
        """Run the trainer's code."""
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
        """Code of the run, called by the trainer's."""
        before, self._theirs = self._theirs, False
        try:
            yield
        finally:
            self._theirs = before

    def takes(self) -> bool:
        """Whether what the calling thread writes now is the trainer's or Ray's."""
        thread = threading.current_thread()
        return (self._theirs and thread is threading.main_thread()) or thread.name.startswith("ray")


class _Fork:
    """A text stream in front of two others."""

    def __init__(self, terminal: IO[str], file: IO[str], redirect: Redirect) -> None:
        self._terminal, self._file, self._redirect = terminal, file, redirect

    def write(self, text: str) -> int:
        if self._file.closed:  # the trainer kept hold of it: a progress bar, say, which ends when it is collected
            with self._redirect.log.open("a", encoding="utf-8") as file:
                return file.write(text)
        return (self._file if self._redirect.takes() else self._terminal).write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._terminal, name)
