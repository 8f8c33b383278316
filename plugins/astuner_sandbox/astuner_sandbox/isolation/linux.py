"""The few calls into the C library that Python has no name for; on other systems they say that they are missing.

Landlock is one of them: which files a process may touch, by path; Linux 5.13 and later, without any right or container.
It is granted once, taken back never, and inherited by children.  It governs what is *opened*: that a path exists, and
how big it is, can still be asked.
"""

from __future__ import annotations

import os
import signal
import stat
import struct
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
_CAPABILITIES_VERSION_3 = 0x20080522
_ONES_THAT_LOOK = 1 << 19 | 1 << 21 | 1 << 38 | 1 << 40
"""CAP_SYS_PTRACE, CAP_SYS_ADMIN, CAP_PERFMON, CAP_CHECKPOINT_RESTORE: to see into any process."""


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


def hide() -> None:
    """Let no process of this user (but root's) read this one's memory or variables, until it executes; Linux only."""
    if sys.platform.startswith("linux"):
        prctl(PR_SET_DUMPABLE, 0)


_CREATE, _ADD, _RESTRICT = 444, 445, 446  # the same numbers on every architecture
_EXECUTE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 2, 1 << 3
_REFER = 1 << 13
_MAKE_DEVICES = 1 << 6 | 1 << 11
_ON_A_FILE = _EXECUTE | 1 << 1 | _READ_FILE | 1 << 14 | 1 << 15  # write, truncate and ioctl too
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 5: 16}
"""ABI -> how many rights on files there are."""
_TCP = 1 << 0 | 1 << 1
_ABSTRACT_SOCKETS, _SIGNALS = 1 << 0, 1 << 1


def landlock_abi() -> int:
    """The kernel's version of Landlock.

    :raises OSError: it has none, or it is switched off.
    """
    return syscall(_CREATE, None, 0, 1)


def keep_apart() -> None:
    """Keep the calling thread, and what it starts, from looking into other processes; for ever, also for root.

    It reads no variables, memory or open files of processes that it did not start, and, from Linux 6.12, signals none.
    Files stay as they are.  It cannot mount, and gains no rights by what it executes; root keeps those of its
    capabilities that do not see into processes.

    :raises OSError: as `apart_abi`.
    """
    version = apart_abi()
    attributes = struct.pack("=Q", _REFER) + (struct.pack("=QQ", 0, _SIGNALS) if version >= 6 else b"")
    ruleset = syscall(_CREATE, attributes, len(attributes), 0)
    try:
        _allow_path(ruleset, "/", _REFER, must_exist=True)
        _take_on(ruleset)
    finally:
        os.close(ruleset)
    _drop(_ONES_THAT_LOOK)  # who has them reads the variables of others, Landlock or not (may_access_mm in the kernel)


def apart_abi() -> int:
    """The kernel's version of Landlock, if `keep_apart` works with it.

    :raises OSError: there is none, or an older one, under which no file can be moved to another folder.
    """
    version = landlock_abi()
    if version < 2:
        raise OSError("this needs the Landlock of Linux 5.19 or later")
    return version


def _drop(capabilities: int) -> None:
    import ctypes

    header, sets = struct.pack("=Ii", _CAPABILITIES_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    _call(libc().capget, header, sets)
    for n in range(6):  # effective, permitted, inheritable: their lower halves, then their upper ones
        sets[n] &= ~(capabilities >> (0 if n < 3 else 32))
    _call(libc().capset, header, sets)


def _take_on(ruleset: int) -> None:
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    syscall(_RESTRICT, ruleset, 0)


def restrict_files(read: Sequence[str], write: Sequence[str]) -> None:
    """Confine the calling thread, and what it starts, to these files and folders; for ever.

    Nothing may be executed; TCP and abstract Unix sockets are forbidden too, where the kernel can.

    :param read: may be read, with all below; what does not exist is passed over.
    :param write: may be read, changed and made; must exist.
    :raises OSError: the kernel has no Landlock, or a folder to write does not exist.
    """
    ruleset, rights = _ruleset(landlock_abi())
    try:
        for path in read:
            _allow_path(ruleset, path, (_READ_FILE | _READ_DIR) & rights)
        for path in write:
            _allow_path(ruleset, path, rights & ~(_EXECUTE | _MAKE_DEVICES), must_exist=True)
        _take_on(ruleset)
    finally:
        os.close(ruleset)


def _ruleset(version: int) -> tuple[int, int]:
    """A set that forbids everything this version can forbid: its descriptor, and its rights on files."""
    rights = (1 << max(bits for since, bits in _FILE_RIGHTS.items() if since <= version)) - 1
    attributes = struct.pack("=Q", rights)
    if version >= 4:
        attributes += struct.pack("=Q", _TCP)
    if version >= 6:  # signals reach this process and its own children only
        attributes += struct.pack("=Q", _SIGNALS | _ABSTRACT_SOCKETS)
    return syscall(_CREATE, attributes, len(attributes), 0), rights


def _allow_path(ruleset: int, path: str, rights: int, *, must_exist: bool = False) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        if must_exist:
            raise
        return
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= _ON_A_FILE
        syscall(_ADD, ruleset, 1, struct.pack("=Qi", rights, descriptor), 0)
    finally:
        os.close(descriptor)
