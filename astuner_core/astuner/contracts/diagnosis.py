"""Findings of ``astuner doctor``, and helpers for checks: one line per possible cause of a failed run, with a fix."""

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
    """``fail``: runs with this package cannot work, so the command exits with 1. ``skip``: does not apply to this
    environment."""
    what: str
    """The checked item, in a word or two."""
    detail: str
    """Its state."""
    fix: str = ""
    """Command that fixes it."""


ok, skip, warn, fail = (functools.partial(Finding, level=level) for level in ("ok", "skip", "warn", "fail"))


def version(dist: str) -> str | None:
    """Return the installed version, or None if the package is missing or its metadata cannot be read."""
    try:
        return metadata.version(dist) or None
    except Exception:  # a METADATA file may contain anything
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
    """Return the output of ``nvidia-smi``, or None if it is not installed or finds no GPU.

    :raises TimeoutError: It does not answer, e.g. because the driver hangs.
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
            yield text, "not a valid requirement"
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
