"""Interpreters other than our own: finding one that fits, and asking one what it has.

Invariant: an interpreter is believed only after it has run; a name on the PATH may be a stub that fails (pyenv's shims
are such).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from astuner.contracts.errors import ConfigError, RunError

ANSWER_WITHIN = 60.0
"""Seconds; a cold interpreter on a slow disk takes some."""
NEWEST_MINOR = 15
"""python3.N is looked for up to this N."""

_ASK = """
import importlib.metadata, importlib.util, json, sys
modules = json.loads(sys.argv[1])
print(json.dumps({
    "version": ".".join(map(str, sys.version_info[:3])),
    "executable": sys.executable,
    "packages": {d.metadata["Name"]: d.version for d in importlib.metadata.distributions() if d.metadata["Name"]},
    "modules": [m for m in modules if importlib.util.find_spec(m.partition(".")[0]) is not None],
}))
"""


@dataclass(frozen=True, kw_only=True)
class Interpreter:
    """What an interpreter said about itself."""

    path: str
    """As it calls itself; absolute."""
    version: str
    packages: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Normalised distribution name -> version."""
    modules: tuple[str, ...] = ()
    """Which of the modules that were asked for it can find."""

    def lacks(self, requirements: Sequence[str]) -> list[tuple[str, str]]:
        """The requirements it does not meet, each with what it has instead.

        What is no requirement of a name (a path, a URL) cannot be looked up, and is left out.
        """
        missing = []
        for text in requirements:
            try:
                requirement = Requirement(text)
            except InvalidRequirement:
                continue
            have = self.packages.get(canonicalize_name(requirement.name))
            if have is None:
                missing.append((text, "it is not installed"))
            elif not requirement.specifier.contains(have, prereleases=True):
                missing.append((text, f"{have} is installed"))
        return missing


def ask(python: str | Path, modules: Sequence[str] = ()) -> Interpreter:
    """Run an interpreter and let it say what it is.

    :param modules: which modules to look for; they are not imported.
    :raises RunError: it cannot be run, or does not answer.
    """
    command = [str(python), "-I", "-c", _ASK, json.dumps(list(modules))]
    try:
        shown = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=ANSWER_WITHIN, stdin=subprocess.DEVNULL
        )
    except OSError as e:
        raise RunError(f"{python} cannot be run: {e.strerror}") from None
    except subprocess.TimeoutExpired:
        raise RunError(f"{python} does not answer within {ANSWER_WITHIN:g} s") from None
    try:
        said: dict[str, Any] = json.loads(shown.stdout.splitlines()[-1])
        packages: dict[str, str] = {canonicalize_name(name): version for name, version in said["packages"].items()}
        return Interpreter(
            path=said["executable"], version=said["version"], packages=packages, modules=tuple(said["modules"])
        )
    except (IndexError, ValueError, KeyError, TypeError):
        last = (shown.stderr.strip() or shown.stdout.strip() or f"exit code {shown.returncode}").splitlines()[-1]
        raise RunError(f"{python} is no Python that works: {last}") from None


def find(wanted: str, chosen: Path | None = None) -> Interpreter:
    """An interpreter whose version is in ``wanted`` (as in ``>=3.11,<3.14``; empty: any).

    :param chosen: take this one; else our own if it fits, then python3.N on the PATH, the newest first, then what uv
        knows of.
    :raises ConfigError: there is none, or ``chosen`` does not fit; says what to type.
    """
    fits = SpecifierSet(wanted)
    if chosen is not None:
        path = shutil.which(chosen.expanduser()) or chosen.expanduser()
        try:
            found = ask(path)
        except RunError as e:
            raise ConfigError(f"--python {chosen}: {e}") from None
        if not fits.contains(found.version):
            raise ConfigError(f"--python {chosen} is Python {found.version}, and {wanted} is needed")
        return found
    seen: list[str] = []
    for candidate in _candidates(wanted):
        try:
            found = ask(candidate)
        except RunError:
            continue  # a stub, or half an installation; nobody asked for it
        if fits.contains(found.version):
            return found
        seen.append(f"{found.version} ({candidate})")
    advice = "uv python install 3.12" if shutil.which("uv") else "install one, e.g. with uv or your system's packages"
    raise ConfigError(
        f"no Python {wanted} was found, only {', '.join(dict.fromkeys(seen)) or 'none'}; "
        f"name one with --python PATH, or: {advice}"
    )


def _candidates(wanted: str) -> Iterator[str]:
    yield sys.executable
    fits = SpecifierSet(wanted)
    minors = [f"3.{n}" for n in range(NEWEST_MINOR, 8, -1) if any(fits.contains(f"3.{n}.{p}") for p in (0, 99))]
    for name in (*(f"python{minor}" for minor in minors), "python3"):
        for folder in os.get_exec_path():
            if (path := shutil.which(name, path=folder)) is not None:
                yield path
    if (uv := shutil.which("uv")) is not None:
        command = [uv, "python", "find", "--no-python-downloads", wanted or ">=3"]
        shown = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        if shown.returncode == 0:
            yield shown.stdout.strip()


@lru_cache(maxsize=1)
def own() -> Interpreter:
    """The interpreter that the service runs on: this one."""
    return ask(sys.executable)


def clean_environ() -> dict[str, str]:
    """Our variables for a program of another interpreter: without those that would make it load our packages."""
    return {k: v for k, v in os.environ.items() if not k.startswith("PYTHON") and k != "__PYVENV_LAUNCHER__"}
