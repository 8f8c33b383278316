"""Create directories for untrusted code and remove them whatever the code leaves in them.

They are in a root directory that is locked while its process lives; the next process removes roots of killed processes.
Invariants: a root with a held lock belongs to a living process; no function recurses, because code can nest directories
deeper than Python's stack and longer than the maximum path.
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
    """A new, locked root directory.

    :param prefix: Start of the names of these roots; no other directory may use it.
    :param parent: Directory in which it is created; None for the directory of temporary files.
    """

    def __init__(self, prefix: str, parent: Path | None = None) -> None:
        parent = parent or Path(tempfile.gettempdir())
        remove_abandoned(prefix, parent)
        unlocked = Path(tempfile.mkdtemp(prefix=f"new-{prefix}", dir=parent))  # 0700
        self._lock = os.open(unlocked / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path = unlocked.rename(unlocked.with_name(unlocked.name.removeprefix("new-")))

    def new(self, prefix: str = "") -> Path:
        """Return a new empty directory for one run. Pass it to `remove` afterwards."""
        return Path(tempfile.mkdtemp(prefix=prefix, dir=self.path))

    def close(self) -> None:
        """Remove everything; log what cannot be removed."""
        clear(self.path)
        os.close(self._lock)


def remove_abandoned(prefix: str, parent: Path) -> None:
    """Remove the roots of this user's ended processes; log what cannot be removed."""
    for entry in list(os.scandir(parent)):
        if not entry.name.startswith(prefix) or not entry.is_dir(follow_symlinks=False):
            continue
        try:
            if entry.stat(follow_symlinks=False).st_uid == os.getuid():
                _remove_unless_held(Path(entry.path))
        except FileNotFoundError:
            pass  # being created, or just removed by another process
        except OSError as e:
            log.warning("cannot remove the files of an ended process in %s: %s", entry.path, e)


def clear(*left: Path) -> None:
    """Remove the files of untrusted code; log what cannot be removed."""
    for path in left:
        try:
            remove(path)
        except OSError as e:
            log.warning("cannot remove %s: %s", path, e)


def remove(folder: Path) -> None:
    """Remove a directory recursively, moving the contents of subdirectories up level by level.

    If the code replaced it, for example with a link, the replacement is removed.

    :raises OSError: Something cannot be removed.
    """
    with contextlib.suppress(FileNotFoundError):
        if folder.is_symlink() or not folder.is_dir():
            folder.unlink()
            return
        os.chmod(folder, 0o700)
        unguessable, number = secrets.token_hex(8), 0  # unguessable, so that the code cannot have created it
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
    """Remove everything except directories and return them; they can now be moved and listed."""
    folders = []
    with os.scandir(folder) as found:
        for entry in list(found):
            if entry.is_dir(follow_symlinks=False):
                os.chmod(entry.path, 0o700)
                folders.append(Path(entry.path))
            else:
                os.unlink(entry.path)
    return folders
