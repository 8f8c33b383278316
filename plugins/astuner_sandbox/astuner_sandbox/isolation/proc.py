"""What ``/proc`` says of processes.  Without it (not Linux) there are none.

Invariant: a process that ends while it is looked at is no error; it is one that has ended.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

PROC = Path("/proc")
STATE, PARENT, SESSION, FLAGS, THREADS = 0, 1, 3, 6, 17
"""Where `fields` has them."""


def processes() -> list[int]:
    """The pids of all processes, those that ended and are not reaped included."""
    return [int(entry) for entry in os.listdir(PROC) if entry.isdigit()] if PROC.is_dir() else []


def fields(pid: int) -> Sequence[str]:
    """What follows the command's name in ``/proc/PID/stat``, the state first; nothing when the process has ended."""
    try:
        # the name, in parentheses, may hold anything: split after the last one
        return (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ()


def number(pid: int, field: int) -> int:
    """One of `fields`; -1 when the process has ended."""
    found = fields(pid)
    return int(found[field]) if found else -1
