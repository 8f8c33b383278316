"""Folders that strange code writes to, gone with it whatever it has put there.

They lie in a root, which is locked for as long as its process lives; the roots that killed processes left behind are
removed by the next one.  Invariants: a root whose lock is held belongs to a living process; nothing here recurses, for
code can nest folders deeper than Python's stack and longer than a path may be.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import tempfile
from pathlib import Path

LOCK = ".lock"

log = logging.getLogger(__name__)


class Root:
    """A fresh, locked folder.

    :param prefix: how the names of such roots begin, and no others.
    :param parent: where it is made; None: where temporary files go.
    """

    def __init__(self, prefix: str, parent: Path | None = None) -> None:
        parent = parent or Path(tempfile.gettempdir())
        remove_abandoned(prefix, parent)
        unlocked = Path(tempfile.mkdtemp(prefix=f"new-{prefix}", dir=parent))  # 0700
        self._lock = os.open(unlocked / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path = unlocked.rename(unlocked.with_name(unlocked.name.removeprefix("new-")))

    def new(self, prefix: str = "") -> Path:
        """An empty folder in it, for one run; hand it to `remove` afterwards."""
        return Path(tempfile.mkdtemp(prefix=prefix, dir=self.path))

    def close(self) -> None:
        """Remove everything; what resists is logged, and stays."""
        clear(self.path)
        os.close(self._lock)


def remove_abandoned(prefix: str, parent: Path) -> None:
    """Remove the roots of this user's processes that have ended; what resists is logged, and stays."""
    for entry in list(os.scandir(parent)):
        if not entry.name.startswith(prefix) or not entry.is_dir(follow_symlinks=False):
            continue
        try:
            if entry.stat(follow_symlinks=False).st_uid == os.getuid():
                _remove_unless_held(Path(entry.path))
        except FileNotFoundError:
            pass  # being made, or removed by somebody else just now
        except OSError as e:
            log.warning("what an ended process left in %s cannot be removed: %s", entry.path, e)


def clear(*left: Path) -> None:
    """Remove what somebody's code left; what resists is logged, and stays until the machine is cleaned."""
    for path in left:
        try:
            remove(path)
        except OSError as e:
            log.warning("%s cannot be removed: %s", path, e)


def remove(folder: Path) -> None:
    """Remove a folder and all in it; what is in subfolders is moved up first, level by level.

    Where something else stands in its place, such as a link to elsewhere, that is removed.

    :raises OSError: something resists.
    """
    with contextlib.suppress(FileNotFoundError):
        if folder.is_symlink() or not folder.is_dir():
            folder.unlink()
            return
        os.chmod(folder, 0o700)
        unguessable, number = secrets.token_hex(8), 0  # so that nobody has put something there before
        while subfolders := _empty_of_files(folder):
            for subfolder in subfolders:
                for deeper in _empty_of_files(subfolder):
                    number += 1
                    os.rename(deeper, folder / f"{unguessable}-{number}")
                os.rmdir(subfolder)
        os.rmdir(folder)


def _remove_unless_held(root: Path) -> None:
    lock = os.open(root / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove(root)
    except BlockingIOError:
        pass  # its process lives
    finally:
        os.close(lock)


def _empty_of_files(folder: Path) -> list[Path]:
    """Remove what is no folder; the folders that are left, which may now be moved and looked into."""
    folders = []
    with os.scandir(folder) as found:
        for entry in list(found):
            if entry.is_dir(follow_symlinks=False):
                os.chmod(entry.path, 0o700)
                folders.append(Path(entry.path))
            else:
                os.unlink(entry.path)
    return folders
