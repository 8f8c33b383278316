"""How many instances this machine can hold, and what they take of its memory.

An instance spends most of its life waiting for a model, so that processors bound it loosely and memory strictly.
Containers count: what a control group may still use is what there is.  Forked processes share most of their pages, so
resident sizes do not add up; proportional ones do (each shared page counted in parts), where the kernel tells them.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

T = TypeVar("T")

PER_CORE = 16
RESERVED_MB = 1024
"""Left to the rest of the machine."""
IDLE_TTL = 1800.0
"""Seconds after which an instance that nobody asks gives its place to others, unless it is said otherwise."""


def capacity(memory_mb: Iterable[int], cores: int | None = None, free_mb: int | None = None) -> tuple[int, str]:
    """The most instances to run at once, and how that came about.

    :param memory_mb: what one instance of each environment takes; the largest counts.
    :param cores: by default those that this process may use.
    :param free_mb: by default what is available now.
    """
    each = max(memory_mb, default=256)
    cores = cores if cores is not None else len(os.sched_getaffinity(0))
    free_mb = free_mb if free_mb is not None else available_mb()
    by_memory = max(0, free_mb - RESERVED_MB) // max(1, each)
    instances = max(1, min(PER_CORE * cores, by_memory))
    why = f"the smaller of {PER_CORE} x {cores} cores and ({free_mb} - {RESERVED_MB}) MB free / {each} MB each"
    return instances, why


def available_mb(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that new processes can have, in MiB."""
    available: int = psutil.virtual_memory().available
    return min([available >> 20, *_left_in_groups(cgroup)])


def _left_in_groups(folder: Path) -> list[int]:
    for most, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            limit = (folder / most).read_text().strip()
            if limit.isdecimal():
                return [max(0, int(limit) - int((folder / used).read_text())) >> 20]
        except OSError:  # no such control group here
            continue
    return []


def tree_bytes(roots: Mapping[str, int]) -> dict[str, int]:
    """The memory of processes, each with all its descendants, in bytes; 0 for one that is gone.

    :param roots: name -> pid.
    """
    return {name: sum(map(_bytes, family)) for name, family in _families(roots).items()}


@dataclass(frozen=True)
class Share:
    """What an instance may have."""

    pid: int
    zygote: int | None
    """The pid of the process that it shares pages with, which do not count."""
    max_memory_mb: int
    max_processes: int


def excesses(shares: Mapping[T, Share]) -> dict[T, tuple[str, str]]:
    """Who has more than its share: ``memory`` or ``processes``, and a sentence's end about it.

    A process counts with all its descendants, also those that became daemons.
    """
    families, found = _families({who: share.pid for who, share in shares.items()}), {}
    zygotes = {pid: _resident(pid) for pid in {share.zygote for share in shares.values()} if pid is not None}
    for who, share in shares.items():
        family = families[who]
        if len(family) > share.max_processes:
            found[who] = "processes", f"had {len(family)} processes, and may have {share.max_processes} (max_processes)"
            continue
        shared = 0 if share.zygote is None else zygotes.get(share.zygote, 0)
        most = shared + (share.max_memory_mb << 20)
        if sum(_resident(process.pid) for process in family) > most and (taken := sum(map(_bytes, family))) > most:
            took = f"took {(taken - shared) >> 20} MB of memory, and may take {share.max_memory_mb} (max_memory_mb)"
            found[who] = "memory", took
    return found


def _families(roots: Mapping[T, int]) -> dict[T, list[psutil.Process]]:
    """Each process with all its descendants, in one look at all there are."""
    known: dict[int, psutil.Process] = {}
    children: defaultdict[int, list[psutil.Process]] = defaultdict(list)
    for process in psutil.process_iter(["ppid"]):
        known[process.pid] = process
        children[process.info["ppid"]].append(process)
    found = {}
    for name, pid in roots.items():
        family = found[name] = [known[pid]] if pid in known else []
        for process in family:  # which grows meanwhile
            family += children[process.pid]
    return found


def _resident(pid: int) -> int:
    """No less than `_bytes`, and quicker to know."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return int(psutil.Process(pid).memory_info().rss)
    return 0


def _bytes(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.NoSuchProcess):  # ended just now
        try:
            return int(process.memory_full_info().pss)
        except (psutil.AccessDenied, AttributeError):  # not ours to see, or a kernel that does not count it
            taken = process.memory_info()
            return int(taken.rss) - int(getattr(taken, "shared", 0))
    return 0
