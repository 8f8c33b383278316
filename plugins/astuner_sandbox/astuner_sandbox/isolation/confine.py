"""Taking rights away from the calling process, irrevocably: files, network, other processes, and how much it may use.

Landlock, seccomp and resource limits, each where the system has it; none needs root or a container.  What could not be
taken is never passed over in silence: `confine` says so in its `Level`, or refuses.
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
"""What confined Python may read beside its library: what that links against, time zones, devices.

Absolute paths; not all of them exist everywhere.
"""


class NotConfined(AstunerError):
    """The system cannot give the protection that is required; says what is missing."""


@dataclass(frozen=True, kw_only=True)
class Confinement:
    """What a process may still do. Everything that is not named here is forbidden.

    Never allowed: a socket of any family, but pairs connected to each other (what is open already stays usable); to
    start or signal another process (threads may be started); tracing other processes or reading their memory, mounting,
    changing clocks, keys, users, owners of files, System V and POSIX shared queues.
    """

    read: tuple[str, ...] = ()
    """Files and folders (with all below) that may be read; those that do not exist are passed over."""
    write: tuple[str, ...] = ()
    """Files and folders that may be read, changed and made; they must exist."""
    cpu_s: int | None = None
    """Seconds of processor time, then SIGKILL."""
    memory_mb: int | None = None
    """Address space in MiB; beyond it an allocation fails."""
    file_mb: int | None = None
    """The size of one file in MiB."""
    open_files: int | None = None
    """The highest number of a descriptor, and so how many files, sockets and pipes may be open at once."""


@dataclass(frozen=True)
class Level:
    """What was granted of a confinement, part by part."""

    applied: tuple[str, ...] = ()
    """Of ``files``, ``network``, ``processes``, ``system calls``, ``privileges``, ``limits``."""
    lacking: Mapping[str, str] = field(default_factory=dict)
    """The others that were asked for -> why they are not there."""

    @property
    def missing(self) -> tuple[str, ...]:
        """One line for each part that is not there."""
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
    """Confine the calling process; it must have one thread.

    :param require: raise when something is missing, rather than saying so in the result.
    :raises NotConfined: something is missing that is required; what could be taken away has been.
    :raises OSError: a folder to write does not exist.
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
    # last, so that no limit is in the way of what needs memory or a descriptor for a moment
    note(["limits"], _limit(c))
    level = Level(tuple(applied), lacking)
    if require and lacking:
        lines = "\n".join(f"- {line}" for line in level.missing)
        raise NotConfined(f"this system cannot confine a process as is required here:\n{lines}")
    return level


@cache
def available() -> Level:
    """What this system can do, found out in a process of its own; the same for as long as this one runs."""
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
        return Level((), {"everything": f"a process that confines itself fails: {why}"})
    return Level.from_json(json.loads(done.stdout))


def _files(c: Confinement) -> str | None:
    try:
        linux.landlock_abi()
    except OSError as e:
        return f"no Landlock here ({e}); it needs Linux 5.13 or later, with `landlock` in CONFIG_LSM or lsm="
    return _attempt(lambda: linux.restrict_files(c.read, c.write))


def _limit(c: Confinement) -> str | None:
    """Set the limits that are not None, once and for all, and forbid core dumps; why it failed, else None."""
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
        except (ValueError, OSError) as e:  # macOS knows no limit of the address space
            failed.append(f"{name} ({e})")
    return f"this system does not limit {', '.join(failed)}" if failed else None


def _attempt(step: Any) -> str | None:
    """Why a step failed, else None."""
    try:
        step()
    except OSError as e:
        return f"this system refuses it ({e})"
    return None


@cache
def library() -> tuple[str, ...]:
    """Where this interpreter's modules are installed.

    A package installed in editable mode is not among them: its folder may hold anything.
    """
    return tuple(dict.fromkeys(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")))


@cache
def readable() -> tuple[str, ...]:
    """What a script needs to run: `library`, and `SYSTEM`."""
    return tuple(dict.fromkeys([*library(), *site.getsitepackages(), *SYSTEM]))
