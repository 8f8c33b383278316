"""The few calls into the C library that Python has no name for; on other systems they say that they are missing."""

from __future__ import annotations

import os
import signal
import struct
import sys
from functools import cache
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
_CAPABILITIES_VERSION_3 = 0x20080522


@cache
def libc() -> Any:
    """The C library, which keeps ``errno``.

    :raises OSError: this is not Linux, or the interpreter has no ctypes.
    """
    if not sys.platform.startswith("linux"):
        raise OSError(f"{sys.platform} has no such call")
    try:
        import ctypes
    except ImportError as e:
        raise OSError(f"this interpreter has no ctypes ({e})") from None
    return ctypes.CDLL(None, use_errno=True)


def syscall(number: int, *args: Any) -> int:
    """Any system call; integers are passed in full width.

    :raises OSError: it failed.
    """
    result: int = _call(libc().syscall, number, *args)
    return result


def prctl(option: int, value: int = 0, pointer: int = 0) -> int:
    """:raises OSError: it failed, or this is not Linux."""
    result: int = _call(libc().prctl, option, value, pointer, 0, 0)
    return result


def _call(function: Any, *args: Any) -> Any:
    import ctypes

    result = function(*(ctypes.c_long(a) if isinstance(a, int) else a for a in args))
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def die_with(parent: int) -> None:
    """Have this process killed when its parent ends; ends it at once if ``parent`` is not its parent any more."""
    if sys.platform.startswith("linux"):
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended between the fork and now
            os._exit(1)


def adopt_orphans() -> None:
    """What this process's descendants leave behind becomes its child rather than init's; Linux only."""
    if sys.platform.startswith("linux"):
        prctl(PR_SET_CHILD_SUBREAPER, 1)


def drop_privileges() -> None:
    """Give up every capability, unreadable to other processes of the same user, and never to gain any right again.

    :raises OSError: this is not Linux.
    """
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    _call(libc().capset, struct.pack("=Ii", _CAPABILITIES_VERSION_3, 0), bytes(24))
    prctl(PR_SET_DUMPABLE, 0)
