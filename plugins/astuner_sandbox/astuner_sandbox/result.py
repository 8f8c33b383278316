"""What a run of code may use, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from astuner.contracts.errors import EnvironmentFailed

Outcome = Literal["finished", "timeout", "cpu", "output", "disk", "threads", "killed"]


class SandboxFailed(EnvironmentFailed):
    """The sandbox itself broke; says nothing about the code."""


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """What one run may use; what goes beyond is stopped, or fails inside the code with an ordinary exception."""

    seconds: float = 300
    """Of wall time; a run may ask for less, never for more."""
    cpu_seconds: int = 60
    """Of processor time, all threads together."""
    memory_mb: int = 1024
    """Address space in MiB, the interpreter's own (about 40) included: beyond it there is a MemoryError."""
    file_mb: int = 16
    """The size of one file in MiB: beyond it writing fails."""
    disk_mb: int = 64
    """All files of a run together in MiB; looked at twenty times a second."""
    files: int = 2000
    """Files and folders of a run; looked at likewise."""
    open_files: int = 64
    threads: int = 64
    """Looked at likewise."""
    output_kb: int = 64
    """Of standard output in KiB, and as much of standard error; code that prints more is stopped."""
    parallel: int = 16
    """Runs at once; others wait their turn, and their time does not count."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"SandboxLimits.{name} must be more than 0, not {value!r}")


@dataclass(frozen=True, kw_only=True)
class CodeResult:
    """What a run of code came to."""

    stdout: str
    """What it printed, at most `SandboxLimits.output_kb`; bytes that are no UTF-8 are replaced."""
    stderr: str
    """Likewise; with a traceback where the code failed, and a line that says why it was stopped where it was."""
    returncode: int
    """As a Python script's: 0, what ``sys.exit`` was given, 1 after an exception. -1: the sandbox stopped it. Another
    negative number: a signal ended it."""
    outcome: Outcome
    """``finished``: it ended by itself, well or badly. ``killed``: a signal that is not the sandbox's. Else the limit
    that it ran into."""
    seconds: float
    """Wall time, from the request to the last of its output."""
