"""Finding processes by descent: children of this process, and whatever carries a mark of ours.

A mark is an unguessable value in the environment that a zygote starts with and that everything below it inherits, so
nothing that is not ours is ever found.  Without ``/proc`` (not Linux) nothing is found at all.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

MARK = "ASTUNER_ZYGOTE"
_PROC = Path("/proc")


def children_of_this_process() -> set[int]:
    """The pids of the direct children, those that ended and are not reaped included."""
    try:
        return {int(pid) for task in _tasks() for pid in (task / "children").read_text().split()}
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN
        return {pid for pid in _processes() if _parent(pid) == os.getpid()}


def kill_marked(mark: str, sessions: set[int]) -> list[int]:
    """Kill what carries a mark, or is in one of these sessions, whose leaders have ended; the pids that were killed.

    A process that has made itself unreadable is found by its session only.
    """
    wanted = f"{MARK}={mark}".encode()
    killed = []
    for pid in _processes():
        if pid == os.getpid():
            continue
        try:
            marked = wanted in (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
        except OSError:  # ended meanwhile, or another user's
            marked = False
        if marked or _stat(pid, 3) in sessions:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
    return killed


def _processes() -> list[int]:
    return [int(entry) for entry in os.listdir(_PROC) if entry.isdigit()] if _PROC.is_dir() else []


def _tasks() -> list[Path]:
    return list((_PROC / "self" / "task").iterdir())


def _parent(pid: int) -> int:
    return _stat(pid, 1)


def _stat(pid: int, field: int) -> int:
    """A field after the command name in ``/proc/PID/stat``; -1 for a process that has ended."""
    try:
        # the name may hold spaces and parentheses itself: split after the last one
        return int((_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[field])
    except (FileNotFoundError, ProcessLookupError):
        return -1
