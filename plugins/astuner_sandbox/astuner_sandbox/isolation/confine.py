"""Irrevocably remove rights from the current process: files, network, other processes and resources.

It uses Landlock, seccomp and resource limits where the system supports them; none needs root or a container. Missing
protection is never ignored: `confine` reports it in its `Level`, or raises.
"""

from __future__ import annotations

import json
import os
import resource
import site
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import astuner
from astuner.contracts.errors import AstunerError
from astuner_sandbox.isolation import linux, seccomp

SYSTEM = (
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/usr/share/zoneinfo",
    "/dev/urandom",
    "/dev/zero",
)
"""Files that confined Python may read in addition to its library: shared libraries, time zones, devices.

Absolute paths; some do not exist on every system.
"""


class NotConfined(AstunerError):
    """The system cannot provide the required protection; the message lists what is missing."""


@dataclass(frozen=True, kw_only=True)
class Confinement:
    """Rights of a confined process. Everything that is not listed is forbidden.

    Always forbidden: sockets of any family, except connected pairs (open ones stay usable); starting or signaling other
    processes (threads are allowed); tracing other processes or reading their memory; mounting; changing clocks, keys,
    users or owners of files; System V and POSIX shared queues.
    """

    read: tuple[str, ...] = ()
    """Files and directories (recursively) that may be read; missing ones are ignored."""
    write: tuple[str, ...] = ()
    """Files and directories that may be read, changed and created; they must exist."""
    cpu_s: int | None = None
    """Seconds of processor time, then SIGKILL."""
    memory_mb: int | None = None
    """Address space in MiB; larger allocations fail."""
    file_mb: int | None = None
    """Maximum size of a file in MiB."""
    open_files: int | None = None
    """Highest descriptor number, which limits open files, sockets and pipes."""


@dataclass(frozen=True)
class Level:
    """Granted parts of a confinement."""

    applied: tuple[str, ...] = ()
    """Subset of ``files``, ``network``, ``processes``, ``system calls``, ``privileges``, ``limits``."""
    lacking: Mapping[str, str] = field(default_factory=dict)
    """Reasons why the other requested parts are missing, by part."""

    @property
    def missing(self) -> tuple[str, ...]:
        """One line for each missing part."""
        return tuple(f"{part}: {why}" for part, why in self.lacking.items())

    def as_json(self) -> dict[str, Any]:
        return {"applied": list(self.applied), "lacking": dict(self.lacking)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Level:
        return cls(tuple(data["applied"]), dict(data["lacking"]))

    def __str__(self) -> str:
        there = f"confined: {', '.join(self.applied)}" if self.applied else "not confined"
        return there + "".join(f"; not confined: {line}" for line in self.missing)


def confine(confinement: Confinement, require: bool = False) -> Level:
    """Confine the current process, which must have one thread.

    :param require: Raise if something is missing, instead of reporting it in the result.
    :raises NotConfined: Required protection is missing; the available parts have been applied.
    :raises OSError: A directory to write does not exist.
    """
    c = confinement
    applied: list[str] = []
    lacking: dict[str, str] = {}

    def note(parts: list[str], why: str | None) -> None:
        if why is None:
            applied.extend(parts)
        else:
            lacking.update((part, why) for part in parts)

    for path in c.write:
        os.stat(path)
    note(["files"], _files(c))
    note(["privileges"], _attempt(linux.drop_privileges))
    note(["system calls", "network", "processes"], _attempt(seccomp.install))
    # last, so that no limit affects code that temporarily needs memory or a descriptor
    note(["limits"], _limit(c))
    level = Level(tuple(applied), lacking)
    if require and lacking:
        lines = "\n".join(f"- {line}" for line in level.missing)
        raise NotConfined(f"this system cannot confine a process as required:\n{lines}")
    return level


@cache
def available() -> Level:
    """Return what this system supports, tested once in a separate process."""
    packages = Path(__file__).absolute().parents[1], Path(astuner.__file__).absolute().parent
    homes = [str(package.parent) for package in packages]
    code = (
        f"import sys; sys.path[:] = [p for p in sys.path if p] + {homes!r}\n"
        "import json, astuner_sandbox.isolation.confine as c\n"
        "print(json.dumps(c.confine(c.Confinement()).as_json()))"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return Level((), {"everything": f"a process that confines itself failed: {why}"})
    return Level.from_json(json.loads(done.stdout))


def _files(c: Confinement) -> str | None:
    try:
        linux.landlock_abi()
    except OSError as e:
        return f"Landlock is not available ({e}); it needs Linux 5.13 or later, with `landlock` in CONFIG_LSM or lsm="
    return _attempt(lambda: linux.restrict_files(c.read, c.write))


def _limit(c: Confinement) -> str | None:
    """Set the limits that are not None and forbid core dumps; return an error message or None."""
    failed = []
    for name, number, value in (
        ("processor time", resource.RLIMIT_CPU, c.cpu_s),
        ("memory", resource.RLIMIT_AS, None if c.memory_mb is None else c.memory_mb << 20),
        ("file size", resource.RLIMIT_FSIZE, None if c.file_mb is None else c.file_mb << 20),
        ("open files", resource.RLIMIT_NOFILE, c.open_files),
        ("core dumps", resource.RLIMIT_CORE, 0),
    ):
        if value is None:
            continue
        hard = resource.getrlimit(number)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        try:
            resource.setrlimit(number, (value, value))
        except (ValueError, OSError) as e:  # macOS does not limit the address space
            failed.append(f"{name} ({e})")
    return f"this system cannot limit {', '.join(failed)}" if failed else None


def _attempt(step: Any) -> str | None:
    """Run a step and return an error message or None."""
    try:
        step()
    except OSError as e:
        return f"this system rejects it ({e})"
    return None


@cache
def library() -> tuple[str, ...]:
    """Return the directories in which this interpreter's modules are installed.

    Packages in editable mode are not included, because their directories may contain anything.
    """
    return tuple(dict.fromkeys(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")))


@cache
def readable() -> tuple[str, ...]:
    """Return everything that a script may read: `library` and `SYSTEM`."""
    return tuple(dict.fromkeys([*library(), *site.getsitepackages(), *SYSTEM]))
