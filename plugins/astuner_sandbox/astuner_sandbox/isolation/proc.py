"""Processes: what ``/proc`` says of them, finding those of ours by descent and by a mark, and how they end.

Without ``/proc`` there are none to be found.

A mark is an unguessable value in the environment that a zygote starts with and that everything below it inherits, so
nothing that is not ours is ever found.  Invariant: a process that ends while it is looked at is no error; it is one
that has ended.  A forked child never returns into what its parent was doing.
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
"""Where `fields` has them."""
MARK = "ASTUNER_ZYGOTE"
_KERNEL_THREAD = 0x00200000  # PF_KTHREAD in include/linux/sched.h


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


def children_of_this_process() -> set[int]:
    """The pids of the direct children, those that ended and are not reaped included."""
    try:
        return {
            int(pid) for task in (PROC / "self" / "task").iterdir() for pid in (task / "children").read_text().split()
        }
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


def address_space_mb() -> int:
    """Of this process, in MiB, which every process forked from it begins with. Without ``/proc``, a guess."""
    try:
        pages = int((PROC / "self" / "statm").read_text().split()[0])
    except FileNotFoundError:
        return 1 << 16  # large enough; macOS limits no address space
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


def leave_after(work: Callable[[], object]) -> NoReturn:
    """Call ``work``, the whole of a forked child's life, and `leave` as a script would that ends so."""
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
    """End this process now, with what it printed but without what its parent registered for its own exit."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, full, or replaced: it ends anyhow
            stream.flush()
    os._exit(code)


def how_it_ended(returncode: int) -> str:
    """An exit code, or minus a signal's number, in words."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:  # a real-time signal
        name = f"signal {-returncode}"
    return f"killed by {name}" + (" (out of memory?)" if returncode == -signal.SIGKILL else "")


def kill_with_group(pid: int) -> None:
    """Kill a process that is not reaped yet, and its group, where it has come as far as having one."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    kill_group(pid)


def kill_group(pid: int) -> None:
    """Kill what is left in a process's group; nothing, where there is none."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
