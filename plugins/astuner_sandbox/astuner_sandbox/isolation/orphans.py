"""Finding processes by descent: children of this process, and whatever carries a mark of ours.

A mark is an unguessable value in the environment that a zygote starts with and that everything below it inherits, so
nothing that is not ours is ever found.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from astuner_sandbox.isolation.proc import FLAGS, PARENT, PROC, SESSION, STATE, fields, number, processes

MARK = "ASTUNER_ZYGOTE"
_KERNEL_THREAD = 0x00200000  # PF_KTHREAD in include/linux/sched.h


def children_of_this_process() -> set[int]:
    """The pids of the direct children, those that ended and are not reaped included."""
    try:
        return {int(pid) for task in _tasks() for pid in (task / "children").read_text().split()}
    except FileNotFoundError:  # a kernel without CONFIGPROC_CHILDREN
        return {pid for pid in processes() if number(pid, PARENT) == os.getpid()}


def kill_marked(mark: str, sessions: set[int]) -> list[int]:
    """Kill what carries a mark, or is in one of these sessions, whose leaders have ended; the pids that were killed.

    Looks again, for up to a second, until a look finds nothing new and no process without an environment: what is
    killed may have forked since it was listed, and a process in the midst of its ``exec`` has no environment to read
    yet.  A process that has made itself unreadable is found by its session only.
    """
    wanted = f"{MARK}={mark}".encode()
    killed: list[int] = []
    deadline = time.monotonic() + 1
    while True:
        look_again = False
        for pid in set(processes()) - {os.getpid(), *killed}:
            try:
                environ = (PROC / str(pid) / "environ").read_bytes()
            except OSError:  # ended meanwhile, or another user's
                environ = None
            if (environ and wanted in environ.split(b"\0")) or number(pid, SESSION) in sessions:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
                    killed.append(pid)
                    look_again = True
            elif environ == b"" and _may_be_starting(pid):
                look_again = True
        if not look_again or time.monotonic() > deadline:
            return killed
        time.sleep(0.01)


def _may_be_starting(pid: int) -> bool:
    """Whether a process that shows no environment may show one soon: neither ended nor the kernel's own."""
    found = fields(pid)
    return bool(found) and found[STATE] not in "ZX" and not int(found[FLAGS]) & _KERNEL_THREAD


def _tasks() -> list[Path]:
    return list((PROC / "self" / "task").iterdir())
