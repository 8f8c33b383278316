"""What processes take of the machine's memory.

Forked processes share most of their pages, so resident sizes do not add up; proportional ones do (each shared page
counted in parts), where the kernel tells them.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from astuner_sandbox.isolation.proc import PARENT, PROC, number, processes

_PAGE = os.sysconf("SC_PAGE_SIZE")


def tree_bytes(roots: Mapping[str, int]) -> dict[str, int]:
    """The memory of processes, each with all its descendants, in bytes; 0 for one that is gone.

    :param roots: name -> pid.
    """
    children = defaultdict(list)
    for pid in processes():
        children[number(pid, PARENT)].append(pid)
    return {name: sum(_bytes(PROC / str(pid)) for pid in _family(root, children)) for name, root in roots.items()}


def _family(root: int, children: Mapping[int, Sequence[int]]) -> Iterator[int]:
    left = [root]
    while left:
        pid = left.pop()
        yield pid
        left += children.get(pid, ())


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
