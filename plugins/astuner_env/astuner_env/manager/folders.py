"""The service's root: a folder of its own with a scratch folder for each instance, and nothing is written elsewhere.

Names in it are chosen here and never come from a request.  A service that was killed leaves its root behind; the next
one to start removes it.  Invariant: a root whose lock is held belongs to a living service.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import tempfile
from pathlib import Path
from types import TracebackType

_PREFIX = "astuner-env-"
_LOCK = "lock"


class Root:
    """A fresh root; a context manager that removes it."""

    def __init__(self, parent: Path | None = None) -> None:
        parent = parent or Path(tempfile.gettempdir())
        remove_abandoned(parent)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))  # 0700
        early = self.path / f"{_LOCK}.new"
        self._lock = os.open(early, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        early.rename(self.path / _LOCK)  # nobody finds it before it is held

    def home(self, environment: str) -> Path:
        """The folder of an environment's zygote."""
        return self.path / environment / "zygote"

    def scratch(self, environment: str) -> Path:
        """A new, empty folder for an instance."""
        folder = self.path / environment / f"i-{secrets.token_hex(8)}"
        folder.mkdir(mode=0o700, parents=True)
        return folder

    def __enter__(self) -> Root:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        remove(self.path)
        os.close(self._lock)


def remove(folder: Path, *files: Path) -> None:
    """Remove what an instance left; what cannot be removed stays until the machine is cleaned."""
    shutil.rmtree(folder, ignore_errors=True)
    for file in files:
        file.unlink(missing_ok=True)


def remove_abandoned(parent: Path) -> None:
    """Remove the roots of this user's services that are no more."""
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # being made or removed just now, or not ours
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove(folder)
        except BlockingIOError:  # its service lives
            pass
        finally:
            os.close(lock)
