"""``astuner env doctor``: what would stop an environment on this machine, and what to type.

Invariant: looking changes nothing, and starts nothing but interpreters that say what they have.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet

from astuner.contracts.errors import AstunerError, ConfigError, RunError
from astuner.contracts.hookspecs import EnvironmentProvider
from astuner_env import interpreter, settings
from astuner_env.environment_setup import EnvironmentSettings, Finding
from astuner_env.providers import absent
from astuner_env.setup import has_interpreter, setup_of


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What was found about one environment, or about the machine."""

    name: str
    findings: Sequence[Finding]
    wanted: bool
    """Whether somebody has begun to set it up; of others it is no fault that something is missing."""

    @property
    def is_ready(self) -> bool:
        return all(finding.ok for finding in self.findings)


def diagnose(name: str, provider: EnvironmentProvider) -> Diagnosis:
    """Look at everything that ``provider`` needs, in the order in which it would be missed."""
    try:
        settings.file_of(name)
    except ConfigError as e:
        return Diagnosis(name=name, findings=[Finding(what=str(e), ok=False)], wanted=False)
    begun = settings.is_saved(name) or (settings.folder_of(name) / "venv").exists()
    return Diagnosis(name=name, findings=list(_findings(name, provider)), wanted=begun)


def machine() -> Diagnosis:
    """What holds for every environment here."""
    return Diagnosis(name="this machine", findings=list(_machine()), wanted=True)


def missing_for(name: str, provider: EnvironmentProvider) -> str:
    """What one has to type first, found without starting an interpreter; empty when it looks ready."""
    try:
        python = settings.load(name).python
    except AstunerError:
        return f"astuner env doctor {name}"  # which says what is wrong with its settings
    if has_interpreter(provider):
        return "" if python and shutil.which(python) else f"astuner env setup {name}"
    if absent(provider.requires):
        return provider.install or f"astuner env doctor {name}"
    if provider.setup and not settings.is_saved(name):
        return f"astuner env setup {name}"
    return ""


def _findings(name: str, provider: EnvironmentProvider) -> Iterator[Finding]:
    setup = f"astuner env setup {name}"
    try:
        kept = settings.load(name)
    except RunError as e:
        yield Finding(what=str(e), ok=False, hint=setup)
        return
    there = yield from _interpreter(provider, kept, setup)
    if there is not None:
        yield from _packages(provider, there, setup)
        yield from _own(name, provider, kept)
    yield _room(provider)


def _interpreter(
    provider: EnvironmentProvider, kept: EnvironmentSettings, setup: str
) -> Generator[Finding, None, interpreter.Interpreter | None]:
    own_one = has_interpreter(provider)
    if own_one and not kept.python:
        wanted = f", Python {provider.python}" if provider.python else ""
        yield Finding(what=f"the interpreter of its own{wanted} is not there yet", ok=False, hint=setup)
        return None
    python = kept.python or sys.executable
    try:
        there = interpreter.ask(python, provider.requires)
    except RunError as e:
        yield Finding(what=str(e), ok=False, hint=setup)
        return None
    whose = "of its own" if own_one else "the service's"
    fits = SpecifierSet(provider.python).contains(there.version)
    wanted = "" if fits else f", but {provider.python} is needed"
    yield Finding(what=f"Python {there.version}{wanted}, {whose}: {there.path}", ok=fits, hint="" if fits else setup)
    return there


def _packages(provider: EnvironmentProvider, there: interpreter.Interpreter, setup: str) -> Iterator[Finding]:
    lacking = dict(there.lacks(provider.packages))
    for text in provider.packages:
        if text in lacking:
            yield Finding(what=f"needs {text}, but {lacking[text]}", ok=False, hint=setup)
        else:
            yield Finding(what=f"has {text}")
    for module in provider.requires:
        if module in there.modules:
            yield Finding(what=f"has the module {module}")
        else:
            how = setup if has_interpreter(provider) else provider.install or f"{there.path} -m pip install {module}"
            yield Finding(what=f"needs the module {module}, which is not installed", ok=False, hint=how)


def _own(name: str, provider: EnvironmentProvider, kept: EnvironmentSettings) -> Iterator[Finding]:
    """What the provider's `EnvironmentSetup` says."""
    try:
        own_steps = setup_of(name, provider)
        if own_steps is not None:
            yield from own_steps.doctor(kept)
    except AstunerError as e:
        yield Finding(what=str(e), ok=False)
    except Exception as e:
        yield Finding(what=f"{provider.setup} raised while it looked: {type(e).__name__}: {e}", ok=False)


def _room(provider: EnvironmentProvider) -> Finding:
    from astuner_env.manager.capacity import capacity

    there = capacity([provider.memory_mb])
    return Finding(what=f"room for {there.instances} instances at once: {there.why}")


def _machine() -> Iterator[Finding]:
    from astuner_sandbox.isolation import confine

    level = confine.available()
    yield Finding(what=f"what models write is {level}")
