"""One process at a time: a file that is locked by whoever works, and names them.

Invariant: the lock is the system's, so it is gone when its process is, however that ended; what stands in the file is
for messages only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Taken(Exception):
    """Another process holds the lock."""

    def __init__(self, pid: str) -> None:
        super().__init__(f"pid {pid}")
        self.pid = pid
        """Whose it is, or ``unknown``."""


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file ``path``, made if it is not there; its folder is.

    :raises Taken: another process holds it, or this one already does.
    :raises OSError: the file cannot be made.
    """
    import fcntl

    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            raise Taken(file.read().strip() or "unknown") from None
        file.seek(0)
        file.truncate()
        file.write(str(os.getpid()))
        file.flush()
        yield


def check_free(path: Path) -> None:
    """Whether `locked` would succeed now; writes nothing.

    :raises Taken: no.
    """
    import fcntl

    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            raise Taken(file.read().strip() or "unknown") from None
