"""What processes take of the machine's memory.

Forked processes share most of their pages, so resident sizes do not add up; proportional ones do (each shared page
counted in parts), where the kernel tells them.
"""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")
_PROC = Path("/proc")


def tree_bytes(root: int) -> int:
    """The memory of a process and of all its descendants, in bytes; 0 when it is gone."""
    children = defaultdict(list)
    for folder in _PROC.iterdir():
        if folder.name.isdecimal() and (parent := _parent(folder)) is not None:
            children[parent].append(int(folder.name))
    total, left = 0, [root]
    while left:
        pid = left.pop()
        total += _bytes(_PROC / str(pid))
        left += children[pid]
    return total


def _parent(folder: Path) -> int | None:
    try:
        # the command's name, in parentheses, may hold anything: split after the last one
        return int((folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except (OSError, IndexError):  # it ended just now
        return None


def _bytes(folder: Path) -> int:
    try:
        for line in (folder / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    except OSError:  # not ours to see, or ended just now
        pass
    try:
        _, resident, shared, *_ = (folder / "statm").read_text().split()
        return (int(resident) - int(shared)) * _PAGE
    except (OSError, ValueError):
        return 0
