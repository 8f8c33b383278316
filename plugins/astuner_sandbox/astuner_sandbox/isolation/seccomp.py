"""seccomp: which system calls a process may make, decided in the kernel by a small program; for ever.

Refused calls fail with an error that Python turns into an ordinary exception.  Changing a file's mode or times is the
one thing that is answered with success and not done: copying a file does it, and in a scratch folder nobody needs it.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator, Sequence

from astuner_sandbox.isolation.linux import PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, PR_SET_PDEATHSIG, prctl
from astuner_sandbox.isolation.syscalls import LAST_KNOWN, NUMBERS

_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Machine -> its column in `NUMBERS`, and the kernel's word for it."""
_PR_SET_SECCOMP, _MODE_FILTER = 22, 2
_PR_SET_PTRACER = 0x59616D61
_LOAD, _EQUAL, _GREATER, _SET, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06  # of the classic BPF machine
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_CLONE_THREAD, _CLONE_NEW_ANYTHING = 0x00010000, 0x7E020000
_UNIX, _STREAM = 1, 1
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_FIOSETOWN, _SIOCSPGRP = 0x8901, 0x8902
_F_SETOWN, _F_SETSIG, _F_SETOWN_EX = 8, 10, 15  # by which a descriptor sends signals to whom one likes

_NEVER = """ptrace process_vm_readv process_vm_writev kcmp pidfd_getfd process_madvise process_mrelease add_key keyctl
request_key bpf perf_event_open userfaultfd io_uring_setup io_uring_enter io_uring_register mount umount2 pivot_root
chroot unshare setns open_tree move_mount fsopen fsconfig fsmount fspick mount_setattr statmount listmount
name_to_handle_at open_by_handle_at quotactl quotactl_fd acct syslog fanotify_init fanotify_mark inotify_add_watch
lookup_dcookie vhangup personality modify_ldt iopl ioperm kexec_load kexec_file_load init_module finit_module
delete_module reboot swapon swapoff settimeofday clock_settime adjtimex clock_adjtime sethostname setdomainname shmget
shmat shmctl msgget msgsnd msgrcv msgctl semget semop semctl semtimedop mq_open mq_unlink memfd_create memfd_secret
mknod mknodat truncate chown fchown lchown fchownat setxattr lsetxattr fsetxattr removexattr lremovexattr fremovexattr
setpriority ioprio_set migrate_pages move_pages rt_sigqueueinfo rt_tgsigqueueinfo"""
_PRETENDED = "chmod fchmod fchmodat fchmodat2 utime utimes utimensat futimesat"
_NETWORK = "socket connect bind listen accept accept4"
_PROCESSES = "fork vfork execve execveat setsid setpgid tkill pidfd_send_signal"
_OF_ITSELF_ONLY = "prlimit64 sched_setaffinity sched_setscheduler sched_setparam sched_setattr"

Instruction = tuple[int, int, int, int]


def install(*, network: bool, processes: bool) -> None:
    """Filter the calls of this process, which must have one thread, and of what it starts.

    :param network: False: no socket but pairs connected to each other.
    :param processes: False: no other process is started or signalled; threads are.
    :raises OSError: the kernel has no seccomp, or this machine's calls are not known here.
    """
    import ctypes

    code = b"".join(struct.pack("=HBBI", *one) for one in program(os.getpid(), network=network, processes=processes))
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    holder = ctypes.create_string_buffer(header, len(header))
    prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.addressof(holder))


def program(pid: int, *, network: bool, processes: bool) -> list[Instruction]:
    """The filter's instructions: code, jump if true, jump if false, operand."""
    machine = os.uname().machine
    if machine not in _ARCHITECTURES:
        raise OSError(f"the system calls of {machine} are not known; x86_64 and aarch64 are")
    column, architecture = _ARCHITECTURES[machine]
    refused = f"{_NEVER} {'' if network else _NETWORK} {'' if processes else _PROCESSES}".split()
    blocks: list[tuple[str, list[Instruction]]] = [
        *((name, [_error(errno.EPERM)]) for name in refused),
        *((name, [_error(0)]) for name in _PRETENDED.split()),
        *((name, _only(0, [0, pid])) for name in _OF_ITSELF_ONLY.split()),
        ("clone3", [_error(errno.ENOSYS)]),  # its arguments lie in memory, where no filter looks; libc then uses clone
        ("prctl", _never(0, [PR_SET_PDEATHSIG, PR_SET_DUMPABLE, _PR_SET_PTRACER])),
        ("ioctl", _never(1, [_TIOCSTI, _TIOCLINUX, _FIOSETOWN, _SIOCSPGRP])),
        ("fcntl", _never(1, [_F_SETOWN, _F_SETSIG, _F_SETOWN_EX])),
    ]
    if processes:
        blocks += [("clone", [_argument(0), (_SET, 0, 1, _CLONE_NEW_ANYTHING), _error(errno.EPERM), _allow()])]
    else:
        blocks += [("clone", [_argument(0), (_SET, 0, 1, _CLONE_THREAD), _allow(), _error(errno.EPERM)])]
        blocks += [("kill", _only(0, [pid])), ("tgkill", _only(0, [pid]))]
    if not network:  # a datagram pair could send elsewhere, a stream pair cannot; asyncio needs one
        flags_off = (0x54, 0, 0, 0xF)  # and
        blocks += [
            (
                "socketpair",
                [
                    _argument(0),
                    (_EQUAL, 0, 3, _UNIX),
                    _argument(1),
                    flags_off,
                    (_EQUAL, 1, 0, _STREAM),
                    _error(errno.EPERM),
                    _allow(),
                ],
            )
        ]
    return [*_preamble(architecture), *_dispatch(blocks, column), _allow()]


def _preamble(architecture: int) -> list[Instruction]:
    return [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),  # the calls of another architecture have other numbers
        (_LOAD, 0, 0, _NUMBER_AT),
        (_GREATER, 0, 1, LAST_KNOWN),  # x32's too, which are the old ones once more
        _error(errno.ENOSYS),
    ]


def _dispatch(blocks: Sequence[tuple[str, list[Instruction]]], column: int) -> Iterator[Instruction]:
    for name, block in blocks:
        number = NUMBERS[name][column]
        if number is not None:
            yield (_EQUAL, 0, len(block), number)
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
