"""Lock files that allow one process at a time.

Invariant: the operating system holds the lock, so it disappears with its process, even after a crash. The contents of
the file (the process ID) are for messages only. A file that cannot be locked is never reported as locked.
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
"""Errors of file systems without locks, such as some network mounts."""


class LockTaken(Exception):
    """Another process holds the lock."""

    def __init__(self, pid: str) -> None:
        super().__init__(f"pid {pid}")
        self.pid = pid
        """Process ID of the holder, or ``unknown``."""


@contextmanager
def lock_file(path: Path) -> Iterator[None]:
    """Hold the lock file ``path`` in this block. The file is created if necessary; its folder must exist.

    :raises LockTaken: Another process, or this process, already holds it.
    :raises RunError: The file system does not support locks.
    :raises OSError: The file cannot be created.
    """
    with path.open("a+", encoding="utf-8") as file:
        _flock(file, path, fcntl.LOCK_EX)
        file.seek(0)
        file.truncate()
        file.write(str(os.getpid()))
        file.flush()
        yield


def check_unlocked(path: Path) -> None:
    """Check that `lock_file` would succeed now, without writing.

    :raises LockTaken: A process holds the lock.
    :raises RunError: The file system does not support locks.
    :raises OSError: The file cannot be read.
    """
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        _flock(file, path, fcntl.LOCK_SH)


def _flock(file: TextIO, path: Path, how: int) -> None:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except OSError as e:
        if isinstance(e, BlockingIOError) or e.errno == errno.EACCES:  # EACCES on NFS
            file.seek(0)
            raise LockTaken(file.read().strip() or "unknown") from None
        why = "its file system does not support locks" if e.errno in _NO_LOCKS else "the system refused"
        raise RunError(
            f"{path} cannot be locked: {why} ({e.strerror or e}). The lock keeps two processes from writing there "
            "concurrently; choose a folder on another file system, such as a local disk"
        ) from None


if not TYPE_CHECKING:
    __getattr__ = astuner.older_names(__name__)
