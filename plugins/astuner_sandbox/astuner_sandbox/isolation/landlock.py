"""Landlock: which files a process may touch, by path; Linux 5.13 and later, without any right or container.

Granted once, taken back never, and inherited by children.  It governs what is *opened*: that a path exists, and how
big it is, can still be asked.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Sequence

from astuner_sandbox.isolation.linux import PR_SET_NO_NEW_PRIVS, prctl, syscall

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # the same numbers on every architecture
_EXECUTE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 2, 1 << 3
_MAKE_DEVICES = 1 << 6 | 1 << 11
_ON_A_FILE = _EXECUTE | 1 << 1 | _READ_FILE | 1 << 14 | 1 << 15  # write, truncate and ioctl too
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 5: 16}
"""ABI -> how many rights on files there are."""
_TCP = 1 << 0 | 1 << 1
_ABSTRACT_SOCKETS, _SIGNALS = 1 << 0, 1 << 1


def abi() -> int:
    """The kernel's version of Landlock.

    :raises OSError: it has none, or it is switched off.
    """
    return syscall(_CREATE, None, 0, 1)


def restrict(read: Sequence[str], write: Sequence[str], execute: Sequence[str], *, network: bool) -> None:
    """Confine the calling thread, and what it starts, to these files and folders; for ever.

    :param read: may be read, with all below; what does not exist is passed over.
    :param write: may be read, changed and made; must exist.
    :param execute: may be read and executed; as ``read``.
    :param network: False also forbids TCP and abstract Unix sockets, where the kernel can.
    :raises OSError: the kernel has no Landlock, or a folder to write does not exist.
    """
    ruleset, rights = _ruleset(abi(), network)
    try:
        for path in read:
            _allow(ruleset, path, (_READ_FILE | _READ_DIR) & rights)
        for path in execute:
            _allow(ruleset, path, (_READ_FILE | _READ_DIR | _EXECUTE) & rights)
        for path in write:
            _allow(ruleset, path, rights & ~(_EXECUTE | _MAKE_DEVICES), must_exist=True)
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        syscall(_RESTRICT, ruleset, 0)
    finally:
        os.close(ruleset)


def _ruleset(version: int, network: bool) -> tuple[int, int]:
    """A set that forbids everything this version can forbid: its descriptor, and its rights on files."""
    rights = (1 << max(bits for since, bits in _FILE_RIGHTS.items() if since <= version)) - 1
    attributes = struct.pack("=Q", rights)
    if version >= 4:
        attributes += struct.pack("=Q", 0 if network else _TCP)
    if version >= 6:  # signals reach this process and its own children only
        attributes += struct.pack("=Q", _SIGNALS if network else _SIGNALS | _ABSTRACT_SOCKETS)
    return syscall(_CREATE, attributes, len(attributes), 0), rights


def _allow(ruleset: int, path: str, rights: int, *, must_exist: bool = False) -> None:
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
