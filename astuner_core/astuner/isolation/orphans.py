"""Finding processes by descent: children of this process, and whatever carries a mark of ours.

A mark is an unguessable value in the environment that a zygote starts with and that everything below it inherits, so
nothing that is not ours is ever found.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from astuner.isolation.proc import PARENT, PROC, SESSION, number, processes

MARK = "ASTUNER_ZYGOTE"


def children_of_this_process() -> set[int]:
    """The pids of the direct children, those that ended and are not reaped included."""
    try:
        return {int(pid) for task in _tasks() for pid in (task / "children").read_text().split()}
    except FileNotFoundError:  # a kernel without CONFIGPROC_CHILDREN
        return {pid for pid in processes() if number(pid, PARENT) == os.getpid()}


def kill_marked(mark: str, sessions: set[int]) -> list[int]:
    """Kill what carries a mark, or is in one of these sessions, whose leaders have ended; the pids that were killed.

    A process that has made itself unreadable is found by its session only.
    """
    wanted = f"{MARK}={mark}".encode()
    killed = []
    for pid in processes():
        if pid == os.getpid():
            continue
        try:
            marked = wanted in (PROC / str(pid) / "environ").read_bytes().split(b"\0")
        except OSError:  # ended meanwhile, or another user's
            marked = False
        if marked or number(pid, SESSION) in sessions:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
    return killed


def _tasks() -> list[Path]:
    return list((PROC / "self" / "task").iterdir())
