"""Call C library functions that Python does not provide; they raise OSError on other systems.

One of them is Landlock, which restricts the files of a process by path; it needs Linux 5.13 or later but no privileges
or container. Restrictions cannot be removed and are inherited by children. They apply to *opening* files: the existence
and size of a path remain visible.
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
"""CAP_SYS_PTRACE, CAP_SYS_ADMIN, CAP_PERFMON and CAP_CHECKPOINT_RESTORE, which allow reading any process."""


@cache
def libc() -> Any:
    """Return the C library, which keeps ``errno``.

    :raises OSError: The system is not Linux, or the interpreter has no ctypes.
    """
    if not sys.platform.startswith("linux"):
        raise OSError(f"{sys.platform} does not support this call")
    try:
        import ctypes
    except ImportError as e:
        raise OSError(f"this interpreter has no ctypes ({e})") from None
    return ctypes.CDLL(None, use_errno=True)


def syscall(number: int, *args: Any) -> int:
    """Make a system call; integers are passed in full width.

    :raises OSError: The call failed.
    """
    result: int = _call(libc().syscall, number, *args)
    return result


def prctl(option: int, value: int = 0, pointer: int = 0) -> int:
    """Call ``prctl``.

    :raises OSError: The call failed, or the system is not Linux.
    """
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
    """Kill this process when its parent ends, or immediately if ``parent`` is no longer its parent."""
    if sys.platform.startswith("linux"):
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended after the fork
            os._exit(1)


def adopt_orphans() -> None:
    """Adopt orphaned descendants of this process instead of leaving them to init; Linux only."""
    if sys.platform.startswith("linux"):
        prctl(PR_SET_CHILD_SUBREAPER, 1)


def drop_privileges() -> None:
    """Drop all capabilities, become unreadable to other processes of the same user, and never gain rights again.

    :raises OSError: The system is not Linux.
    """
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    _call(libc().capset, struct.pack("=Ii", _CAPABILITIES_VERSION_3, 0), bytes(24))
    prctl(PR_SET_DUMPABLE, 0)


def hide() -> None:
    """Prevent processes of this user, except root's, from reading this process until it executes; Linux only."""
    if sys.platform.startswith("linux"):
        prctl(PR_SET_DUMPABLE, 0)


_CREATE, _ADD, _RESTRICT = 444, 445, 446  # the same numbers on all architectures
_EXECUTE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 2, 1 << 3
_REFER = 1 << 13
_MAKE_DEVICES = 1 << 6 | 1 << 11
_ON_A_FILE = _EXECUTE | 1 << 1 | _READ_FILE | 1 << 14 | 1 << 15  # includes write, truncate and ioctl
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 5: 16}
"""Number of rights on files by ABI."""
_TCP = 1 << 0 | 1 << 1
_ABSTRACT_SOCKETS, _SIGNALS = 1 << 0, 1 << 1


def landlock_abi() -> int:
    """Return the kernel's version of Landlock.

    :raises OSError: Landlock is missing or disabled.
    """
    return syscall(_CREATE, None, 0, 1)


def keep_apart() -> None:
    """Permanently prevent the current thread and its children from reading other processes; also applies to root.

    They cannot read variables, memory or open files of processes that they did not start and, from Linux 6.12, cannot
    signal them. Access to files does not change. They cannot mount, and gain no rights by executing programs; root
    keeps capabilities that do not allow reading processes.

    :raises OSError: As in `apart_abi`.
    """
    version = apart_abi()
    attributes = struct.pack("=Q", _REFER) + (struct.pack("=QQ", 0, _SIGNALS) if version >= 6 else b"")
    ruleset = syscall(_CREATE, attributes, len(attributes), 0)
    try:
        _allow_path(ruleset, "/", _REFER, must_exist=True)
        _take_on(ruleset)
    finally:
        os.close(ruleset)
    _drop(_ONES_THAT_LOOK)  # these capabilities bypass Landlock when reading variables (may_access_mm in the kernel)


def apart_abi() -> int:
    """Return the kernel's version of Landlock, if `keep_apart` works with it.

    :raises OSError: Landlock is missing, or too old to allow moving files between directories.
    """
    version = landlock_abi()
    if version < 2:
        raise OSError("this requires Landlock of Linux 5.19 or later")
    return version


def _drop(capabilities: int) -> None:
    import ctypes

    header, sets = struct.pack("=Ii", _CAPABILITIES_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    _call(libc().capget, header, sets)
    for n in range(6):  # effective, permitted, inheritable: first the lower halves, then the upper ones
        sets[n] &= ~(capabilities >> (0 if n < 3 else 32))
    _call(libc().capset, header, sets)


def _take_on(ruleset: int) -> None:
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    syscall(_RESTRICT, ruleset, 0)


def restrict_files(read: Sequence[str], write: Sequence[str]) -> None:
    """Permanently restrict the current thread and its children to these files and directories.

    Executing programs is forbidden; so are TCP and abstract Unix sockets, if the kernel supports that.

    :param read: Paths that may be read recursively; missing ones are ignored.
    :param write: Paths that may be read, changed and created; they must exist.
    :raises OSError: The kernel has no Landlock, or a directory to write does not exist.
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
    """Return the descriptor of a rule set that forbids everything this version can forbid, and its rights on files."""
    rights = (1 << max(bits for since, bits in _FILE_RIGHTS.items() if since <= version)) - 1
    attributes = struct.pack("=Q", rights)
    if version >= 4:
        attributes += struct.pack("=Q", _TCP)
    if version >= 6:  # allow signals to this process and its children only
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
