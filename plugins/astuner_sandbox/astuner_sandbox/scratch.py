"""Folders that runs write to: one per run, in one locked folder per sandbox, and what they hold meanwhile."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from astuner_sandbox.isolation.scratch import Root

_PREFIX = "astuner-sandbox-"


class Scratch:
    """The folder of one sandbox."""

    def __init__(self) -> None:
        self._root = Root(_PREFIX)
        self.root = self._root.path

    def new(self) -> Path:
        """An empty folder for one run; hand it to `astuner_sandbox.isolation.scratch.remove` afterwards."""
        return Path(tempfile.mkdtemp(dir=self.root))

    def close(self) -> None:
        """Remove everything."""
        self._root.close()


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
