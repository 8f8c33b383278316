"""Compute how many instances this machine can run, and measure their memory.

An instance waits for a model most of the time, so memory is the strict limit and cores are a loose one. Limits of a
container (control group) count. Forked processes share most of their pages, so resident sizes cannot be added up; the
proportional set size can, where the kernel reports it.
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
"""Memory reserved for the rest of the machine."""
IDLE_TTL = 1800.0
"""Default number of seconds after which an idle instance is ended."""


def capacity(memory_mb: Iterable[int], cores: int | None = None, free_mb: int | None = None) -> tuple[int, str]:
    """Return the maximum number of instances and an explanation.

    :param memory_mb: Memory of one instance of each environment; the largest value counts.
    :param cores: Default: the cores that this process may use.
    :param free_mb: Default: the memory available now.
    """
    each = max(memory_mb, default=256)
    cores = cores if cores is not None else len(os.sched_getaffinity(0))
    free_mb = free_mb if free_mb is not None else available_mb()
    by_memory = max(0, free_mb - RESERVED_MB) // max(1, each)
    instances = max(1, min(PER_CORE * cores, by_memory))
    why = f"the smaller of {PER_CORE} x {cores} cores and ({free_mb} - {RESERVED_MB}) MB free / {each} MB each"
    return instances, why


def available_mb(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the memory available for new processes, in MiB."""
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
        except OSError:  # this control group does not exist
            continue
    return []


def tree_bytes(roots: Mapping[str, int]) -> dict[str, int]:
    """Return the memory of each process with all its descendants, in bytes; 0 if it has ended.

    :param roots: Name -> process ID.
    """
    return {name: sum(map(_bytes, family)) for name, family in _families(roots).items()}


@dataclass(frozen=True)
class Share:
    """Limits of an instance."""

    pid: int
    zygote: int | None
    """Process ID of its zygote; pages shared with the zygote do not count."""
    max_memory_mb: int
    max_processes: int


def excesses(shares: Mapping[T, Share]) -> dict[T, tuple[str, str]]:
    """Return the instances beyond their limits, each with ``memory`` or ``processes`` and a message.

    A process counts with all its descendants, including daemons.
    """
    families, found = _families({who: share.pid for who, share in shares.items()}), {}
    zygotes = {pid: _resident(pid) for pid in {share.zygote for share in shares.values()} if pid is not None}
    for who, share in shares.items():
        family = families[who]
        if len(family) > share.max_processes:
            found[who] = "processes", f"had {len(family)} processes; the limit is {share.max_processes} (max_processes)"
            continue
        shared = 0 if share.zygote is None else zygotes.get(share.zygote, 0)
        most = shared + (share.max_memory_mb << 20)
        if sum(_resident(process.pid) for process in family) > most and (taken := sum(map(_bytes, family))) > most:
            took = f"used {(taken - shared) >> 20} MB of memory; the limit is {share.max_memory_mb} (max_memory_mb)"
            found[who] = "memory", took
    return found


def _families(roots: Mapping[T, int]) -> dict[T, list[psutil.Process]]:
    """Return each process with all its descendants, from one pass over all processes."""
    known: dict[int, psutil.Process] = {}
    children: defaultdict[int, list[psutil.Process]] = defaultdict(list)
    for process in psutil.process_iter(["ppid"]):
        known[process.pid] = process
        children[process.info["ppid"]].append(process)
    found = {}
    for name, pid in roots.items():
        family = found[name] = [known[pid]] if pid in known else []
        for process in family:  # the list grows during iteration
            family += children[process.pid]
    return found


def _resident(pid: int) -> int:
    """Return the resident size, a cheap upper bound of `_bytes`."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return int(psutil.Process(pid).memory_info().rss)
    return 0


def _bytes(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.NoSuchProcess):  # the process just ended
        try:
            return int(process.memory_full_info().pss)
        except (psutil.AccessDenied, AttributeError):  # no permission, or not supported by the kernel
            taken = process.memory_info()
            return int(taken.rss) - int(getattr(taken, "shared", 0))
    return 0
