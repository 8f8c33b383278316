"""How many instances this machine can hold.

An instance spends most of its life waiting for a model, so that processors bound it loosely and memory strictly.
Containers count: what a control group may still use is what there is.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PER_CORE = 16
RESERVED_MB = 1024
"""Left to the rest of the machine."""
IDLE_TTL = 1800.0
"""Seconds after which an instance that nobody asks gives its place to others, unless it is said otherwise."""


@dataclass(frozen=True)
class Capacity:
    """A number of instances, and how it came about."""

    instances: int
    why: str


def capacity(memory_mb: Iterable[int], cores: int | None = None, free_mb: int | None = None) -> Capacity:
    """The most instances to run at once.

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
    return Capacity(instances, why)


def available_mb(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that new processes can have, in MiB."""
    lines = (proc / "meminfo").read_text().splitlines()
    kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return min([kib >> 10, *_left_in_groups(cgroup)])


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
