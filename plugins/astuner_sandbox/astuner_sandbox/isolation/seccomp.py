"""seccomp: which system calls a process may make, decided in the kernel by a small program; for ever.

Refused calls fail with an error that Python turns into an ordinary exception.  Changing a file's mode or times is the
one thing that is answered with success and not done: copying a file does it, and in a scratch folder nobody needs it.
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
"""The system calls that are known by name here: the number on each machine (empty: it has no such call), and the rule:

``never``, ``network``, ``processes``: refused. ``pretended``: answered with success, and not done. ``itself``: for this
process only. ``arguments``: these decide, see `program`.
"""
LAST_KNOWN = 462
"""Newer calls have not been looked at, so a confined process has none of them."""
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Machine -> the kernel's word for it."""
_PR_SET_SECCOMP, _MODE_FILTER = 22, 2
_PR_SET_PTRACER = 0x59616D61
_LOAD, _AND, _EQUAL, _GREATER, _SET, _RETURN = 0x20, 0x54, 0x15, 0x25, 0x45, 0x06  # of the classic BPF machine
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_CLONE_THREAD = 0x00010000
_UNIX, _STREAM = 1, 1
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_FIOSETOWN, _SIOCSPGRP = 0x8901, 0x8902
_F_SETOWN, _F_SETSIG, _F_SETOWN_EX = 8, 10, 15  # by which a descriptor sends signals to whom one likes

Instruction = tuple[int, int, int, int]


def install() -> None:
    """Filter the calls of this process, which must have one thread: no socket but pairs, no process but itself.

    :raises OSError: the kernel has no seccomp, or this machine's calls are not known here.
    """
    import ctypes

    code = b"".join(struct.pack("=HBBI", *one) for one in program(os.getpid()))
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    holder = ctypes.create_string_buffer(header, len(header))
    prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.addressof(holder))


def program(pid: int) -> list[Instruction]:
    """The filter's instructions: code, jump if true, jump if false, operand."""
    machine = os.uname().machine
    if machine not in _ARCHITECTURES:
        raise OSError(f"the system calls of {machine} are not known; x86_64 and aarch64 are")
    refused = [_error(errno.EPERM)]
    rules = dict.fromkeys(("never", "network", "processes"), refused)
    rules |= {"pretended": [_error(0)], "itself": _only(0, [0, pid])}
    kind = [_argument(1), (_AND, 0, 0, 0xF), (_EQUAL, 1, 0, _STREAM)]  # without its flags
    blocks: list[tuple[str, list[Instruction]]] = [
        *((name, rules[call["rule"]]) for name, call in CALLS.items() if call["rule"] in rules),
        ("clone3", [_error(errno.ENOSYS)]),  # its arguments lie in memory, where no filter looks; libc then uses clone
        ("prctl", _never(0, [PR_SET_PDEATHSIG, PR_SET_DUMPABLE, _PR_SET_PTRACER])),
        ("ioctl", _never(1, [_TIOCSTI, _TIOCLINUX, _FIOSETOWN, _SIOCSPGRP])),
        ("fcntl", _never(1, [_F_SETOWN, _F_SETSIG, _F_SETOWN_EX])),
        ("clone", [_argument(0), (_SET, 0, 1, _CLONE_THREAD), _allow(), *refused]),
        ("kill", _only(0, [pid])),
        ("tgkill", _only(0, [pid])),
        # a datagram pair could send elsewhere, a stream pair cannot; asyncio needs one
        ("socketpair", [_argument(0), (_EQUAL, 0, 3, _UNIX), *kind, *refused, _allow()]),
    ]
    return [*_preamble(_ARCHITECTURES[machine]), *_dispatch(blocks, machine), _allow()]


def _preamble(architecture: int) -> list[Instruction]:
    return [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),  # the calls of another architecture have other numbers
        (_LOAD, 0, 0, _NUMBER_AT),
        (_GREATER, 0, 1, LAST_KNOWN),  # x32's too, which are the old ones once more
        _error(errno.ENOSYS),
    ]


def _dispatch(blocks: Sequence[tuple[str, list[Instruction]]], machine: str) -> Iterator[Instruction]:
    for name, block in blocks:
        if number := CALLS[name][machine]:
            yield (_EQUAL, 0, len(block), int(number))
            yield from block


def _argument(index: int) -> Instruction:
    """Its lower half, which is all that the kernel looks at in a pid, a flag or a family."""
    return (_LOAD, 0, 0, _ARGUMENTS_AT + 8 * index)


def _only(index: int, allowed: Sequence[int]) -> list[Instruction]:
    """Allow the call when an argument has one of these values."""
    tests = [(_EQUAL, len(allowed) - at, 0, value) for at, value in enumerate(allowed)]
    return [_argument(index), *tests, _error(errno.EPERM), _allow()]


def _never(index: int, refused: Sequence[int]) -> list[Instruction]:
    """Refuse the call when an argument has one of these values."""
    tests = [(_EQUAL, len(refused) - at, 0, value) for at, value in enumerate(refused)]
    return [_argument(index), *tests, _allow(), _error(errno.EPERM)]


def _error(number: int) -> Instruction:
    return (_RETURN, 0, 0, _ERROR | number)


def _allow() -> Instruction:
    return (_RETURN, 0, 0, _ALLOW)
