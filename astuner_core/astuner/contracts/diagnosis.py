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
    """Return the installed version; None if the package is not installed or its metadata cannot be read."""
    try:
        return metadata.version(dist) or None
    except Exception:  # a METADATA file may hold anything
        return None


def why_no_version(dist: str) -> str:
    """Return why `version` is None."""
    try:
        metadata.version(dist)
    except metadata.PackageNotFoundError:
        return "it is not installed"
    except Exception as e:
        return f"its METADATA file cannot be read ({type(e).__name__}: {e})"
    return "its METADATA file has no version"


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
    """Yield requirements of ``dist`` that this environment does not meet, each with what is installed instead.

    :param extra: Only the requirements of this extra.
    """
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.version import InvalidVersion

    for text in metadata.requires(dist) or ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            yield text, "that is not a valid requirement"
            continue
        if requirement.marker is None and extra:
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        bare = f"{requirement.name}{requirement.specifier}"
        have = version(requirement.name)
        if have is None:
            yield bare, why_no_version(requirement.name)
            continue
        try:
            is_met = requirement.specifier.contains(have, prereleases=True)
        except InvalidVersion:
            is_met = False
        if not is_met:
            yield bare, f"{have} is installed"
