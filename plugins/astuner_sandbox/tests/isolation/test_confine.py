"""What a confined process cannot do any more; each attempt in a child of its own, by Python and by the C library."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from astuner_sandbox.isolation import linux, seccomp
from astuner_sandbox.isolation.confine import Confinement, Level, available
from tests.table import table

ATTEMPTS = Path(__file__).with_name("attempts.py")
LIBC = "import ctypes; libc = ctypes.CDLL(None, use_errno=True)\n"
needs_everything = pytest.mark.needs("confinement")


def try_all(
    attempts: dict[str, str], *, require: bool = False, without: tuple[str, ...] = (), **confinement: Any
) -> Any:
    asked = {"attempts": attempts, "confinement": confinement, "require": require, "without": without}
    done = subprocess.run(
        [sys.executable, str(ATTEMPTS)], input=json.dumps(asked), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def refused(results: dict[str, str]) -> list[str]:
    return [name for name, what in results.items() if what.startswith(("PermissionError", "OSError"))]


@needs_everything
def test_files(tmp_path) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    mine.mkdir()
    other.mkdir()
    (other / "secret").write_text("checkpoint")
    (mine / "way out").symlink_to(other / "secret")
    may = {
        "write and read": f"open('{mine}/a', 'w').write('x'); got = open('{mine}/a').read()",
        "make folders": f"import os; os.makedirs('{mine}/b/c'); os.rename('{mine}/b/c', '{mine}/d'); got = 1",
        "import from the library": "import fractions; got = fractions.Fraction(1, 2)",
        "copy a file": f"import shutil; open('{mine}/e', 'w').close(); got = shutil.copy2('{mine}/e', '{mine}/f')",
    }
    may_not = {
        "read": f"got = open('{other}/secret').read()",
        "read through a link": f"got = open('{mine}/way out').read()",
        "read by a longer way": f"got = open('{mine}/../other/secret').read()",
        "list": f"import os; got = os.listdir('{other}')",
        "change": f"open('{other}/secret', 'a')",
        "cut short": f"import os; os.truncate('{other}/secret', 0)",
        "make": f"open('{other}/new', 'w')",
        "remove": f"import os; os.remove('{other}/secret')",
        "move in": f"import os; os.rename('{other}/secret', '{mine}/got')",
        "link in": f"import os; os.link('{other}/secret', '{mine}/got')",
        "watch": LIBC + f"fd = libc.inotify_init1(0)\nimport os\nif libc.inotify_add_watch(fd, b'{other}', 0xfff) < 0:"
        " raise OSError(ctypes.get_errno(), 'inotify')",
        "own": f"import os; os.chown('{other}/secret', 1, 1)",
        "the parent's environment": "got = open(f'/proc/{parent}/environ').read()",
        "the parent's memory": "got = open(f'/proc/{parent}/mem', 'rb').read(1)",
        "the parent's open files": "import os; got = os.listdir(f'/proc/{parent}/fd')",
        "processes": "import os; got = os.listdir('/proc')",
        "devices": "open('/dev/zero', 'rb')",
        "mount": LIBC + "if libc.mount(b'none', b'/mnt', b'tmpfs', 0, None): raise OSError(ctypes.get_errno(), '')",
        "new root": "import os; os.chroot('/tmp')",
    }
    results = try_all({**may, **may_not}, write=[str(mine)])["results"]
    assert refused(results) == list(may_not), results
    assert (other / "secret").read_text() == "checkpoint"
    assert (other / "secret").stat().st_uid != 1


@needs_everything
def test_permissions_and_times_of_others_files_stay_as_they_are(tmp_path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    before = secret.stat()
    try_all(
        {
            "mode": f"import os; os.chmod('{secret}', 0o777)",
            "times": f"import os; os.utime('{secret}', (0, 0))",
            "mode, newly": LIBC + f"libc.syscall(452, -100, b'{secret}', 0o777, 0)",
        }
    )
    after = secret.stat()
    assert (after.st_mode, after.st_mtime_ns) == (before.st_mode, before.st_mtime_ns)


SOCKETS = {
    family: f"import socket; socket.socket(socket.{family}, socket.{kind})"
    for family, kind in [
        ("AF_INET", "SOCK_STREAM"),
        ("AF_INET", "SOCK_DGRAM"),
        ("AF_INET6", "SOCK_STREAM"),
        ("AF_UNIX", "SOCK_STREAM"),
        ("AF_UNIX", "SOCK_DGRAM"),
        ("AF_NETLINK", "SOCK_RAW"),
        ("AF_PACKET", "SOCK_RAW"),
        ("AF_VSOCK", "SOCK_STREAM"),
        ("AF_ALG", "SOCK_SEQPACKET"),
    ]
}


@needs_everything
def test_network() -> None:
    may = {
        "a pair": "import socket; a, b = socket.socketpair(); a.send(b'x'); got = b.recv(1)",
        "an event loop": "import asyncio; got = asyncio.run(asyncio.sleep(0, 'slept'))",
    }
    may_not = {
        **SOCKETS,
        "by the C library": LIBC + "if libc.socket(2, 1, 0) < 0: raise OSError(ctypes.get_errno(), 'socket')",
        "by number": LIBC + "if libc.syscall(41, 2, 1, 0) < 0: raise OSError(ctypes.get_errno(), 'socket')",
        "by io_uring": LIBC + "if libc.syscall(425, 8, b'0' * 200) < 0: raise OSError(ctypes.get_errno(), 'io_uring')",
        "a pair that can send elsewhere": "import socket; socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
        "connecting what is open": "import socket; socket.socketpair()[0].connect('/dev/log')",
        "a name": "import socket; got = socket.getaddrinfo('localhost', 80)",
    }
    results = try_all({**may, **may_not})["results"]
    named = results.pop("a name")
    assert named.startswith(("gaierror", "PermissionError")), named
    assert refused(results) == [name for name in may_not if name != "a name"], results
    assert results["a pair"] == "got b'x'"


@needs_everything
def test_other_processes() -> None:
    may = {
        "threads": "import threading; t = threading.Thread(target=print); t.start(); t.join(); got = 1",
        "ask for its own limits": "import resource; got = resource.prlimit(0, resource.RLIMIT_CPU)",
        "signal itself": "import os, signal; signal.signal(10, lambda *_: None); os.kill(os.getpid(), 10); got = 1",
    }
    may_not = {
        "fork": "import os; os.fork()",
        "start": "import subprocess; subprocess.run(['/bin/true'])",
        "spawn": "import os; os.posix_spawn('/bin/true', ['true'], {})",
        "become": "import os; os.execv('/bin/true', ['true'])",
        "clone": LIBC + "if libc.syscall(56, 17, 0, 0, 0, 0) < 0: raise OSError(ctypes.get_errno(), 'clone')",
        "clone, newly": LIBC + "if libc.syscall(435, b'0' * 88, 88) < 0: raise OSError(ctypes.get_errno(), 'clone3')",
        "vfork": LIBC + "if libc.syscall(58) < 0: raise OSError(ctypes.get_errno(), 'vfork')",
        "kill the parent": "import os; os.kill(parent, 9)",
        "kill its group": "import os; os.killpg(os.getpgid(parent), 9)",
        "kill everybody": "import os; os.kill(-1, 9)",
        "kill by handle": "import os, signal; signal.pidfd_send_signal(os.pidfd_open(parent), 9)",
        "queue a signal": LIBC + "if libc.sigqueue(parent, 9, None): raise OSError(ctypes.get_errno(), 'sigqueue')",
        "have the kernel signal": "import fcntl, os; fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, parent)",
        "choose what it signals": "import fcntl, os; fcntl.fcntl(os.pipe()[0], fcntl.F_SETSIG, 9)",
        "have a socket signal": "import fcntl, socket, struct; a, b = socket.socketpair(); "
        "fcntl.ioctl(a, 0x8901, struct.pack('i', parent))",
        "trace the parent": LIBC + "if libc.ptrace(16, parent, 0, 0): raise OSError(ctypes.get_errno(), 'ptrace')",
        "read its memory": LIBC + "if libc.syscall(310, parent, 0, 0, 0, 0, 0): raise OSError(ctypes.get_errno(), '')",
        "take its files": LIBC + "if libc.syscall(438, 0, 0, 0) < 0: raise OSError(ctypes.get_errno(), 'pidfd_getfd')",
        "limit it": "import resource; resource.prlimit(parent, resource.RLIMIT_NOFILE, (5, 5))",
        "slow it down": "import os; os.setpriority(os.PRIO_PROCESS, parent, 19)",
        "bind it": "import os; os.sched_setaffinity(parent, {0})",
        "outlive it": LIBC + "if libc.prctl(1, 0, 0, 0, 0): raise OSError(ctypes.get_errno(), 'prctl')",
        "leave the session": "import os; os.setsid()",
        "a namespace": LIBC + "if libc.unshare(0x10000000): raise OSError(ctypes.get_errno(), 'unshare')",
        "a key": LIBC
        + "if libc.syscall(248, b'user', b'a', b'b', 1, -2) < 0: raise OSError(ctypes.get_errno(), 'key')",
        "a queue for others": LIBC + "if libc.msgget(7, 0o1666) < 0: raise OSError(ctypes.get_errno(), 'msgget')",
        "memory for others": LIBC + "if libc.shmget(7, 4096, 0o1666) < 0: raise OSError(ctypes.get_errno(), 'shmget')",
        "a call of next year": LIBC + "if libc.syscall(500) < 0: raise OSError(ctypes.get_errno(), 'new')",
        "memory that is a file": "import os; os.memfd_create('x')",
    }
    if platform.machine() != "x86_64":  # the attempts by number are that machine's
        may_not = {name: code for name, code in may_not.items() if "libc.syscall(" not in code}
    results = try_all({**may, **may_not})["results"]
    assert refused(results) == list(may_not), results


@needs_everything
def test_limits(tmp_path) -> None:
    results = try_all(
        {
            "memory": "x = bytearray(1 << 30)",
            "a big file": f"open('{tmp_path}/big', 'wb').write(bytes(3 << 20))",
            "open files": f"got = [open('{tmp_path}/x', 'w') for _ in range(200)]",
            "processor time": "import signal\nfor n in (24, 15): signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
            "more again": "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (500, 500))",
            "rights": "import os; os.setuid(12345)",
        },
        write=[str(tmp_path)],
        memory_mb=400,
        file_mb=2,
        open_files=50,
        cpu_s=1,
    )["results"]
    assert results["memory"].startswith("MemoryError")
    assert "File too large" in results["a big file"]
    assert "Too many open files" in results["open files"]
    assert results["processor time"] == "EOFError, killed by SIGKILL (out of memory?)"
    assert results["more again"].startswith("ValueError")
    assert results["rights"].startswith("PermissionError")
    assert (tmp_path / "big").stat().st_size <= 2 << 20


NOTHING = {"nothing": "got = 1"}


@table(
    ("without", "lacking"),
    [
        (["landlock"], {"files"}),
        (["seccomp"], {"system calls", "network", "processes"}),
        (["limits"], {"limits"}),
        (["landlock", "seccomp"], {"files", "system calls", "network", "processes"}),
    ],
)
@needs_everything
def test_what_a_system_lacks_is_said_and_the_rest_done(without, lacking) -> None:
    found = try_all(NOTHING, without=tuple(without))
    level = Level.from_json(found["level"])
    assert set(level.lacking) == lacking
    assert set(level.applied) | lacking == {"files", "system calls", "network", "processes", "limits", "privileges"}
    assert len(level.missing) == len(lacking)
    assert all(part in str(level) for part in lacking)
    if "landlock" in without:
        assert "Linux 5.13" in level.missing[list(level.lacking).index("files")]


@table("without", ["landlock", "seccomp", "limits"])
@needs_everything
def test_what_is_required_and_lacking_is_refused(without) -> None:
    results = try_all(NOTHING, without=(without,), require=True)["results"]
    assert results["nothing"].startswith("ForkFailed: a child process could not be confined: this system cannot")


@needs_everything
def test_without_landlock_the_network_is_still_shut_and_without_seccomp_files_are() -> None:
    assert refused(try_all(SOCKETS, without=("landlock",))["results"]) == list(SOCKETS)
    shadow = {"a file": "open('/etc/hostname')", "tcp": "import socket; socket.create_connection(('127.0.0.1', 9))"}
    assert refused(try_all(shadow, without=("seccomp",))["results"]) == list(shadow)


def test_a_folder_to_write_must_exist() -> None:
    results = try_all(NOTHING, write=["/nowhere/at all"])["results"]
    assert results["nothing"].startswith("ForkFailed")
    assert "/nowhere/at all" in results["nothing"]


def test_a_machine_whose_calls_are_unknown_is_said(monkeypatch) -> None:
    monkeypatch.setattr(seccomp.os, "uname", lambda: type("U", (), {"machine": "riscv64"}))
    with pytest.raises(OSError, match="riscv64 are unknown"):
        seccomp.program(1)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_every_jump_of_the_filter_stays_inside_it_and_it_ends_by_allowing(monkeypatch, machine):
    monkeypatch.setattr(seccomp.os, "uname", lambda: type("U", (), {"machine": machine}))
    program = seccomp.program(4321)
    assert len(program) < 4096
    assert program[-1] == (0x06, 0, 0, 0x7FFF0000)
    for at, (code, yes, no, _) in enumerate(program):
        if code in (0x15, 0x25, 0x45):
            assert at + 1 + max(yes, no) < len(program)
            assert max(yes, no) < 256


def test_each_number_means_one_call() -> None:
    for machine in ("x86_64", "aarch64"):
        numbers = [int(call[machine]) for call in seccomp.CALLS.values() if call[machine]]
        assert len(set(numbers)) == len(numbers)
        assert max(numbers) <= seccomp.LAST_KNOWN
    assert len(seccomp.CALLS) == 129
    rules = {"never", "pretended", "network", "processes", "itself", "arguments"}
    assert {call["rule"] for call in seccomp.CALLS.values()} == rules


@table("header", ["/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm-generic/unistd.h"])
def test_the_numbers_are_the_kernels(header) -> None:
    import re

    if not Path(header).exists():
        pytest.skip("the kernel's headers are not installed")
    found = re.findall(r"#define __NR(?:3264)?_(\w+) (\d+)", Path(header).read_text())
    machine = "x86_64" if "x86_64" in header else "aarch64"
    for name, number in found:
        if name in seccomp.CALLS:
            assert seccomp.CALLS[name][machine] == number, name


def test_confinement_and_level_are_values() -> None:
    assert Confinement(read=("/a",)) == Confinement(read=("/a",))
    level = Level(("limits",), {"files": "why"})
    assert Level.from_json(json.loads(json.dumps(level.as_json()))) == level
    assert str(level) == "confined: limits; not confined: files: why"


def test_landlock_says_what_the_kernel_says() -> None:
    assert ("files" in available().applied) == (landlock_abi() > 0)


def landlock_abi() -> int:
    try:
        return linux.landlock_abi()
    except OSError:
        return 0
