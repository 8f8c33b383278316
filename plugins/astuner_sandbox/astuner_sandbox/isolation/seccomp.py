"""Permanently restrict the system calls of a process with a small program in the kernel (seccomp).

Rejected calls fail with an error that Python converts to an ordinary exception. Changing the mode or times of a file is
the only call that reports success without effect: copying a file needs it, and scratch directories do not.
"""

from __future__ import annotations

import csv
import errno
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

from astuner_sandbox.isolation.linux import PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, PR_SET_PDEATHSIG, prctl

with Path(__file__).with_name("syscalls.csv").open(encoding="ascii", newline="") as _file:
    CALLS = {row["name"]: row for row in csv.DictReader(_file)}
"""Known system calls: the number on each machine (empty if missing) and the rule.

``never``, ``network``, ``processes``: rejected. ``pretended``: reports success without effect. ``itself``: for this
process only. ``arguments``: depends on the arguments, see `program`.
"""
LAST_KNOWN = 462
"""Highest reviewed call number; confined processes cannot make newer calls."""
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""The kernel's architecture constants by machine."""
_PR_SET_SECCOMP, _MODE_FILTER = 22, 2
_PR_SET_PTRACER = 0x59616D61
# instructions of the classic BPF machine
_LOAD, _AND, _EQUAL, _GREATER, _SET, _RETURN = 0x20, 0x54, 0x15, 0x25, 0x45, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_CLONE_THREAD = 0x00010000
_UNIX, _STREAM = 1, 1
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_FIOSETOWN, _SIOCSPGRP = 0x8901, 0x8902
_F_SETOWN, _F_SETSIG, _F_SETOWN_EX = 8, 10, 15  # let a descriptor send signals to any process

Instruction = tuple[int, int, int, int]


def install() -> None:
    """Filter the calls of this process, which must have one thread: no sockets except pairs, no other process.

    :raises OSError: The kernel has no seccomp, or the calls of this machine are unknown.
    """
    import ctypes

    code = b"".join(struct.pack("=HBBI", *one) for one in program(os.getpid()))
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    holder = ctypes.create_string_buffer(header, len(header))
    prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.addressof(holder))


def program(pid: int) -> list[Instruction]:
    """Return the filter's instructions: code, jump if true, jump if false, operand."""
    machine = os.uname().machine
    if machine not in _ARCHITECTURES:
        raise OSError(f"the system calls of {machine} are unknown; x86_64 and aarch64 are supported")
    refused = [_error(errno.EPERM)]
    rules = dict.fromkeys(("never", "network", "processes"), refused)
    rules |= {"pretended": [_error(0)], "itself": _only(0, [0, pid])}
    kind = [_argument(1), (_AND, 0, 0, 0xF), (_EQUAL, 1, 0, _STREAM)]  # without its flags
    blocks: list[tuple[str, list[Instruction]]] = [
        *((name, rules[call["rule"]]) for name, call in CALLS.items() if call["rule"] in rules),
        # its arguments are in memory, which filters cannot read; libc falls back to clone
        ("clone3", [_error(errno.ENOSYS)]),
        ("prctl", _never(0, [PR_SET_PDEATHSIG, PR_SET_DUMPABLE, _PR_SET_PTRACER])),
        ("ioctl", _never(1, [_TIOCSTI, _TIOCLINUX, _FIOSETOWN, _SIOCSPGRP])),
        ("fcntl", _never(1, [_F_SETOWN, _F_SETSIG, _F_SETOWN_EX])),
        ("clone", [_argument(0), (_SET, 0, 1, _CLONE_THREAD), _allow(), *refused]),
        ("kill", _only(0, [pid])),
        ("tgkill", _only(0, [pid])),
        # asyncio needs pairs; a stream pair cannot send elsewhere, but a datagram pair could
        ("socketpair", [_argument(0), (_EQUAL, 0, 3, _UNIX), *kind, *refused, _allow()]),
    ]
    return [*_preamble(_ARCHITECTURES[machine]), *_dispatch(blocks, machine), _allow()]


def _preamble(architecture: int) -> list[Instruction]:
    return [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),  # other architectures use other numbers
        (_LOAD, 0, 0, _NUMBER_AT),
        (_GREATER, 0, 1, LAST_KNOWN),  # includes x32, which repeats the old calls
        _error(errno.ENOSYS),
    ]


def _dispatch(blocks: Sequence[tuple[str, list[Instruction]]], machine: str) -> Iterator[Instruction]:
    for name, block in blocks:
        if number := CALLS[name][machine]:
            yield (_EQUAL, 0, len(block), int(number))
            yield from block


def _argument(index: int) -> Instruction:
    """Return the instruction that loads the lower half of an argument; the kernel ignores the rest of IDs and flags."""
    return (_LOAD, 0, 0, _ARGUMENTS_AT + 8 * index)


def _only(index: int, allowed: Sequence[int]) -> list[Instruction]:
    """Allow the call if an argument has one of these values."""
    tests = [(_EQUAL, len(allowed) - at, 0, value) for at, value in enumerate(allowed)]
    return [_argument(index), *tests, _error(errno.EPERM), _allow()]


def _never(index: int, refused: Sequence[int]) -> list[Instruction]:
    """Reject the call if an argument has one of these values."""
    tests = [(_EQUAL, len(refused) - at, 0, value) for at, value in enumerate(refused)]
    return [_argument(index), *tests, _allow(), _error(errno.EPERM)]


def _error(number: int) -> Instruction:
    return (_RETURN, 0, 0, _ERROR | number)


def _allow() -> Instruction:
    return (_RETURN, 0, 0, _ALLOW)
