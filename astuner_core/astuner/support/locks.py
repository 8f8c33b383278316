"""One process at a time: a file that is locked by whoever works, and names them.

Invariant: the lock is the system's, so it is gone when its process is, however that ended; what stands in the file is
for messages only.  A file that cannot be locked is never taken for one that somebody holds.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import astuner
from astuner.contracts.errors import RunError

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What a filesystem without locks says, such as some network mounts."""


class LockTaken(Exception):
    """Another process holds the lock."""

    def __init__(self, pid: str) -> None:
        super().__init__(f"pid {pid}")
        self.pid = pid
        """Whose it is, or ``unknown``."""


@contextmanager
def lock_file(path: Path) -> Iterator[None]:
    """Hold the lock file ``path``, made if it is not there; its folder is.

    :raises LockTaken: another process holds it, or this one already does.
    :raises RunError: its filesystem has no locks.
    :raises OSError: the file cannot be made.
    """
    with path.open("a+", encoding="utf-8") as file:
        _flock(file, path, fcntl.LOCK_EX)
        file.seek(0)
        file.truncate()
        file.write(str(os.getpid()))
        file.flush()
        yield


def check_unlocked(path: Path) -> None:
    """Whether `lock_file` would succeed now; writes nothing.

    :raises LockTaken: no.
    :raises RunError: its filesystem has no locks.
    :raises OSError: the file cannot be read.
    """
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        _flock(file, path, fcntl.LOCK_SH)


def _flock(file: TextIO, path: Path, how: int) -> None:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except OSError as e:
        if isinstance(e, BlockingIOError) or e.errno == errno.EACCES:  # the latter where locks are those of NFS
            file.seek(0)
            raise LockTaken(file.read().strip() or "unknown") from None
        why = "its filesystem has no file locks" if e.errno in _NO_LOCKS else "the system refuses"
        raise RunError(
            f"{path} cannot be locked: {why} ({e.strerror or e}), and without a lock two processes could write there "
            "at once; choose a folder on another filesystem, such as a local disk"
        ) from None


if not TYPE_CHECKING:
    __getattr__ = astuner.older_names(__name__)
