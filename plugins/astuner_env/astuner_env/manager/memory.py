"""What processes take of the machine's memory.

Forked processes share most of their pages, so resident sizes do not add up; proportional ones do (each shared page
counted in parts), where the kernel tells them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import psutil


def tree_bytes(roots: Mapping[str, int]) -> dict[str, int]:
    """The memory of processes, each with all its descendants, in bytes; 0 for one that is gone.

    :param roots: name -> pid.
    """
    return {name: sum(map(_bytes, _family(pid))) for name, pid in roots.items()}


def _family(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _bytes(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.NoSuchProcess):  # ended just now
        try:
            return int(process.memory_full_info().pss)
        except (psutil.AccessDenied, AttributeError):  # not ours to see, or a kernel that does not count it
            taken = process.memory_info()
            return int(taken.rss) - int(getattr(taken, "shared", 0))
    return 0
