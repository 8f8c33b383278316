"""Inspect processes in ``/proc``, find ASTuner's by descent and by a mark, and end them.

Without ``/proc``, no processes are found.

A mark is an unguessable value in the environment of a zygote, which its descendants inherit, so foreign processes are
never found. Invariant: a process that ends during inspection counts as ended, not as an error. A forked child never
returns to the code of its parent.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

PROC = Path("/proc")
STATE, PARENT, SESSION, FLAGS, THREADS = 0, 1, 3, 6, 17
"""Positions in the result of `fields`."""
MARK = "ASTUNER_ZYGOTE"
_KERNEL_THREAD = 0x00200000  # PF_KTHREAD in include/linux/sched.h


def processes() -> list[int]:
    """Return all process IDs, including ended processes that are not reaped."""
    return [int(entry) for entry in os.listdir(PROC) if entry.isdigit()] if PROC.is_dir() else []


def fields(pid: int) -> Sequence[str]:
    """Return the fields after the command's name in ``/proc/PID/stat``; empty if the process has ended."""
    try:
        # the name, in parentheses, may contain anything: split after the last parenthesis
        return (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ()


def number(pid: int, field: int) -> int:
    """Return one of `fields`; -1 if the process has ended."""
    found = fields(pid)
    return int(found[field]) if found else -1


def children_of_this_process() -> set[int]:
    """Return the process IDs of the direct children, including ended ones that are not reaped."""
    try:
        return {
            int(pid) for task in (PROC / "self" / "task").iterdir() for pid in (task / "children").read_text().split()
        }
    except FileNotFoundError:  # kernel without CONFIG_PROC_CHILDREN
        return {pid for pid in processes() if number(pid, PARENT) == os.getpid()}


def kill_marked(mark: str, sessions: set[int]) -> list[int]:
    """Kill processes with a mark, or in one of these sessions whose leaders have ended; return their process IDs.

    The search repeats for up to one second, until it finds nothing new and no process without an environment: a killed
    process may have forked since it was listed, and a process during ``exec`` has no readable environment yet. A
    process that made itself unreadable is found by its session only.
    """
    wanted = f"{MARK}={mark}".encode()
    killed: list[int] = []
    deadline = time.monotonic() + 1
    while True:
        look_again = False
        for pid in set(processes()) - {os.getpid(), *killed}:
            try:
                environ = (PROC / str(pid) / "environ").read_bytes()
            except OSError:  # ended in the meantime, or belongs to another user
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
    """Return whether a process without an environment may get one soon: neither ended nor a kernel thread."""
    found = fields(pid)
    return bool(found) and found[STATE] not in "ZX" and not int(found[FLAGS]) & _KERNEL_THREAD


def address_space_mb() -> int:
    """Return the address space in MiB with which forked processes start; an estimate without ``/proc``."""
    try:
        pages = int((PROC / "self" / "statm").read_text().split()[0])
    except FileNotFoundError:
        return 1 << 16  # large enough; macOS does not limit the address space
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


def leave_after(work: Callable[[], object]) -> NoReturn:
    """Call ``work`` in a forked child, then `leave` with the exit code of an equivalent script."""
    code = 1
    try:
        work()
        code = 0
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        leave(code)


def leave(code: int) -> NoReturn:
    """End this process immediately, with flushed output but without its parent's exit handlers."""
    for stream in (sys.stdout, sys.stderr):
        # closed, full or replaced: the process ends in any case
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)


def how_it_ended(returncode: int) -> str:
    """Describe an exit code or a negative signal number."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:  # a real-time signal
        name = f"signal {-returncode}"
    return f"killed by {name}" + (" (out of memory?)" if returncode == -signal.SIGKILL else "")


def kill_with_group(pid: int) -> None:
    """Kill a process that is not reaped yet, and its group if it already has one."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    kill_group(pid)


def kill_group(pid: int) -> None:
    """Kill the remaining processes of a group, if any."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
