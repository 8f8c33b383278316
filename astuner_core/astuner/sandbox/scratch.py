"""Folders that runs write to: one per run, gone with it, whatever the code has put there.

They lie in one folder per sandbox, which is locked for as long as its process lives; folders that a killed process
left behind are removed by the next sandbox.  Nothing here recurses: code can nest folders deeper than Python's stack
and longer than a path may be.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
from pathlib import Path

_PREFIX = "astuner-sandbox-"
_LOCK = ".lock"


class Scratch:
    """The folder of one sandbox."""

    def __init__(self) -> None:
        remove_stale()
        unlocked = Path(tempfile.mkdtemp(prefix=f"new-{_PREFIX}"))
        self._lock = os.open(unlocked / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.root = unlocked.rename(unlocked.with_name(unlocked.name.removeprefix("new-")))

    def new(self) -> Path:
        """An empty folder for one run; hand it to `remove` afterwards."""
        return Path(tempfile.mkdtemp(dir=self.root))

    def close(self) -> None:
        """Remove everything."""
        remove(self.root)
        os.close(self._lock)


def remove_stale() -> None:
    """Remove what sandboxes of this user left behind whose process has ended."""
    for entry in list(os.scandir(tempfile.gettempdir())):
        if not entry.name.startswith(_PREFIX) or not entry.is_dir(follow_symlinks=False):
            continue
        with contextlib.suppress(FileNotFoundError):  # being made, or removed by somebody else just now
            if entry.stat(follow_symlinks=False).st_uid != os.getuid():
                continue
            lock = os.open(os.path.join(entry.path, _LOCK), os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(Path(entry.path))
            except BlockingIOError:
                pass  # its process lives
            finally:
                os.close(lock)


def remove(folder: Path) -> None:
    """Remove a folder and all in it; what is in subfolders is moved up first, level by level."""
    with contextlib.suppress(FileNotFoundError):
        number = 0
        while subfolders := _empty_of_files(folder):
            for subfolder in subfolders:
                for deeper in _empty_of_files(subfolder):
                    number += 1
                    os.rename(deeper, folder / f"{_PREFIX}{os.getpid()}-{number}")
                os.rmdir(subfolder)
        os.rmdir(folder)


def usage(folder: Path, *, most: int) -> tuple[int, int]:
    """Bytes on disk and entries below a folder, while somebody is writing there; counting ends at ``most`` entries.

    What cannot be looked at, because its path is too long, counts as too many.
    """
    size, entries, left = 0, 0, [str(folder)]
    while left and entries <= most:
        try:
            with os.scandir(left.pop()) as found:
                for entry in found:
                    entries += 1
                    status = entry.stat(follow_symlinks=False)
                    size += status.st_blocks * 512
                    if stat.S_ISDIR(status.st_mode):
                        left.append(entry.path)
                    if entries > most:
                        break
        except (FileNotFoundError, NotADirectoryError):
            continue  # gone again
        except OSError:
            return size, most + 1
    return size, entries


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
