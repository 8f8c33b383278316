"""What ``astuner doctor`` says, and what it asks: one line about each thing that a run may fail on, and its cure."""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of ``astuner doctor``."""

    level: Literal["ok", "skip", "warn", "fail"]
    """``fail`` is what stops a run of whoever has this package: the command then exits with 1. ``skip`` is what this
    environment is not for."""
    what: str
    """What was looked at, in a word or two."""
    detail: str
    """How it is."""
    fix: str = ""
    """What to type."""


ok, skip, warn, fail = (functools.partial(Finding, level=level) for level in ("ok", "skip", "warn", "fail"))


def version(dist: str) -> str | None:
    """Its version here; None where it is not installed."""
    try:
        return metadata.version(dist)
    except metadata.PackageNotFoundError:
        return None


def nvidia_smi(*arguments: str) -> str | None:
    """What ``nvidia-smi`` prints; None where it is not installed or finds no GPU.

    :raises TimeoutError: it does not answer, as with a driver that hangs.
    """
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", *arguments]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        raise TimeoutError("nvidia-smi does not answer") from None
    return shown.stdout if shown.returncode == 0 else None


def unmet(dist: str, extra: str = "") -> Iterator[tuple[str, str]]:
    """Requirements of ``dist`` (those of one extra when given) that this environment does not meet, and what it has."""
    from packaging.requirements import Requirement

    for text in metadata.requires(dist) or ():
        requirement = Requirement(text)
        if requirement.marker is None and extra:
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        bare = f"{requirement.name}{requirement.specifier}"
        have = version(requirement.name)
        if have is None:
            yield bare, "it is not installed"
        elif not requirement.specifier.contains(have, prereleases=True):
            yield bare, f"{have} is installed"
