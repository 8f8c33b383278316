"""What a service serves: names, entry points and limits, as plain data.

Invariant: nothing here imports an environment.  Environments by others are named on the command line; a request can
only choose among these.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from astuner import find_offer, find_user_file, is_code, load_plugins, missing_modules
from astuner.contracts.errors import ConfigError, MissingDependency, PluginError, UnknownName
from astuner.contracts.hookspecs import EnvironmentProvider, Provider
from astuner_env.environment_setup import EnvironmentSettings
from astuner_env.settings import load
from astuner_sandbox.isolation.zygotes import ZygoteSpec

NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
"""How an environment or an instance may be called (and not ``.`` or ``..``)."""
ENTRY_VARIABLE = "ASTUNER_ENV_ENTRY"
"""Tells a zygote which class to import."""


@dataclass(frozen=True, kw_only=True)
class ServedEnvironment:
    """One environment, and how its processes are run."""

    name: str
    """What clients call it (``env_type``)."""
    provider: EnvironmentProvider
    """Its target is ``package.module:Class`` or ``/absolute/file.py:Class``; its splits are empty: it does not say."""
    settings: EnvironmentSettings = field(default=EnvironmentSettings(), repr=False)
    """Its interpreter, empty: this one; and the variables it gets, which may be secrets."""
    hint: str = ""
    """What to type when it cannot be imported."""
    path: Sequence[str] = ()
    """Further folders to import from."""

    def __post_init__(self) -> None:
        if not is_name(self.name):
            raise ConfigError(f"an environment cannot be called {self.name!r}: use letters, digits, '.', '_' and '-'")

    @property
    def max_memory_mb(self) -> int:
        """Beyond this an instance is ended."""
        return self.provider.max_memory_mb or max(1024, 4 * self.provider.memory_mb)

    def limited(self, max_memory_mb: int | None, max_processes: int | None) -> ServedEnvironment:
        """The same with other limits; None leaves the environment's own."""
        own = self.provider
        memory, processes = max_memory_mb or own.max_memory_mb, max_processes or own.max_processes
        return replace(self, provider=replace(own, max_memory_mb=memory, max_processes=processes))

    def zygote(self, home: Path) -> ZygoteSpec:
        """How to start the process that its instances are forked from, with ``home`` as its folder."""
        own = {"HOME": str(home), "TMPDIR": str(home), ENTRY_VARIABLE: self.provider.target}
        return ZygoteSpec(
            python=self.settings.python or sys.executable,
            lent={package: _located(package) for package in ("astuner", "astuner_env", *self.provider.lent)},
            path=tuple(self.path),
            preload=("astuner_env.worker:preload", *self.provider.preload),
            main="astuner_env.worker:main",
            environ={**self.settings.environ, **own},
            cwd=str(home),
        )


def is_name(text: object) -> bool:
    """Whether ``text`` may name an environment or an instance."""
    return isinstance(text, str) and NAME.fullmatch(text) is not None and text not in (".", "..")


def as_environment(provider: Provider) -> EnvironmentProvider:
    """A plain `Provider` has the defaults."""
    return provider if isinstance(provider, EnvironmentProvider) else EnvironmentProvider(**vars(provider))


def find_environments(references: Sequence[str]) -> list[ServedEnvironment]:
    """What is named on a command line.

    :param references: each a registered name, ``plugin/name``, or code as ``[NAME=]path/to/file.py->Class`` or
        ``[NAME=]module->Class``.
    :raises ConfigError: a name is used twice, or is none.
    :raises PluginError: nothing is registered under a name, or a file is missing; as `astuner.find_offer`.
    :raises MissingDependency: the environment is not set up on this machine; says what to type.
    """
    found: dict[str, ServedEnvironment] = {}
    for reference in references:
        name, given, code = reference.partition("=")
        environment = _from_code(code, name) if given else find_environment(reference)
        if environment.name in found:
            raise ConfigError(f"two environments are called {environment.name!r}; write NAME={reference} for one")
        found[environment.name] = environment
    return list(found.values())


def find_environment(reference: str) -> ServedEnvironment:
    """One of `find_environments`."""
    manager = load_plugins()
    try:
        offered = find_offer(manager, "environment", reference)
    except PluginError:
        if not is_code(reference):
            raise
        return _from_code(reference, "")
    name, provider = offered.name, as_environment(offered.provider)
    settings = load(name)
    if not settings.python and (missing := missing_modules(provider)):
        how = provider.install or f"pip install {' '.join(missing)}"
        raise MissingDependency(f"the environment {name!r} needs {', '.join(missing)}; install it with: {how}")
    for package in provider.lent:
        _located(package)
    path = () if settings.python else [folder for folder in sys.path if folder]  # PYTHONPATH and the like
    hint = f"astuner env doctor {name}"
    return ServedEnvironment(name=name, provider=provider, settings=settings, hint=hint, path=path)


def snake_case(name: str) -> str:
    """``TextMaze`` -> ``text_maze``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def _from_code(reference: str, name: str) -> ServedEnvironment:
    where, _, attribute = reference.replace("->", ":").rpartition(":")
    if not where:
        raise ConfigError(f"{reference!r} names no code; write for example maze=path/to/maze.py->Maze")
    file = find_user_file(reference)
    if where.endswith(".py"):
        if file is None:
            raise PluginError(f"{reference!r}: no such file: {Path(where).expanduser().absolute()}")
        entry, path = f"{file}:{attribute}", list[str]()
    elif file is None and importlib.util.find_spec(where.partition(".")[0]) is None:
        raise UnknownName(f"{reference!r}: no module {where} in {Path.cwd()}, nor installed")
    else:
        entry, path = f"{where}:{attribute}", ([str(Path.cwd())] if file is not None else [])
    provider = EnvironmentProvider(target=entry, splits=())
    return ServedEnvironment(name=name or snake_case(attribute), provider=provider, path=path)


def _located(package: str) -> str:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise MissingDependency(f"the package {package} is not installed beside the environment service")
    return str(Path(next(iter(spec.submodule_search_locations))).resolve())
