"""Describe the environments of a service: names, entry points and limits, as plain data.

Invariant: this module imports no environment. Third-party environments are named on the command line; a request can
only select one of them.
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
"""Pattern of environment names and instance IDs (except ``.`` and ``..``)."""
ENTRY_VARIABLE = "ASTUNER_ENV_ENTRY"
"""Variable with the class that a zygote imports."""


@dataclass(frozen=True, kw_only=True)
class ServedEnvironment:
    """Environment and the settings of its processes."""

    name: str
    """Name for clients (``env_type``)."""
    provider: EnvironmentProvider
    """Its target is ``package.module:Class`` or ``/absolute/file.py:Class``. Empty splits mean unknown splits."""
    settings: EnvironmentSettings = field(default=EnvironmentSettings(), repr=False)
    """Interpreter (empty: this one) and variables, which may be secrets."""
    hint: str = ""
    """Command to suggest if the import fails."""
    path: Sequence[str] = ()
    """Additional import folders."""

    def __post_init__(self) -> None:
        if not is_name(self.name):
            raise ConfigError(f"{self.name!r} is not a valid environment name. Use letters, digits, '.', '_' and '-'.")

    @property
    def max_memory_mb(self) -> int:
        """Memory limit of an instance in MB."""
        return self.provider.max_memory_mb or max(1024, 4 * self.provider.memory_mb)

    def limited(self, max_memory_mb: int | None, max_processes: int | None) -> ServedEnvironment:
        """Return a copy with other limits; ``None`` keeps the environment's limit."""
        own = self.provider
        memory, processes = max_memory_mb or own.max_memory_mb, max_processes or own.max_processes
        return replace(self, provider=replace(own, max_memory_mb=memory, max_processes=processes))

    def zygote(self, home: Path) -> ZygoteSpec:
        """Return how to start the process that instances are forked from, with ``home`` as its folder."""
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
    """Return whether ``text`` is a valid environment name or instance ID."""
    return isinstance(text, str) and NAME.fullmatch(text) is not None and text not in (".", "..")


def as_environment(provider: Provider) -> EnvironmentProvider:
    """Return ``provider`` as an `EnvironmentProvider`, with default values for a plain `Provider`."""
    return provider if isinstance(provider, EnvironmentProvider) else EnvironmentProvider(**vars(provider))


def find_environments(references: Sequence[str]) -> list[ServedEnvironment]:
    """Return the environments named on a command line.

    :param references: Each a registered name, ``plugin/name``, or code as ``[NAME=]path/to/file.py->Class`` or
        ``[NAME=]module->Class``.
    :raises ConfigError: A name is invalid or used twice.
    :raises PluginError: A name is not registered, or a file is missing; like `astuner.find_offer`.
    :raises MissingDependency: The environment is not set up; the message contains the command.
    """
    found: dict[str, ServedEnvironment] = {}
    for reference in references:
        name, given, code = reference.partition("=")
        environment = _from_code(code, name) if given else find_environment(reference)
        if environment.name in found:
            raise ConfigError(f"The name {environment.name!r} is used twice. Rename one: NAME={reference}")
        found[environment.name] = environment
    return list(found.values())


def find_environment(reference: str) -> ServedEnvironment:
    """Return the environment of one reference; see `find_environments`."""
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
        raise MissingDependency(f"The environment {name!r} requires {', '.join(missing)}. Install: {how}")
    for package in provider.lent:
        _located(package)
    path = () if settings.python else [folder for folder in sys.path if folder]  # including PYTHONPATH
    hint = f"astuner env doctor {name}"
    return ServedEnvironment(name=name, provider=provider, settings=settings, hint=hint, path=path)


def snake_case(name: str) -> str:
    """Convert ``TextMaze`` to ``text_maze``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def _from_code(reference: str, name: str) -> ServedEnvironment:
    where, _, attribute = reference.replace("->", ":").rpartition(":")
    if not where:
        raise ConfigError(f"{reference!r} is not a reference to code. Example: maze=path/to/maze.py->Maze")
    file = find_user_file(reference)
    if where.endswith(".py"):
        if file is None:
            raise PluginError(f"{reference!r}: file not found: {Path(where).expanduser().absolute()}")
        entry, path = f"{file}:{attribute}", list[str]()
    elif file is None and importlib.util.find_spec(where.partition(".")[0]) is None:
        raise UnknownName(f"{reference!r}: the module {where} is neither in {Path.cwd()} nor installed.")
    else:
        entry, path = f"{where}:{attribute}", ([str(Path.cwd())] if file is not None else [])
    provider = EnvironmentProvider(target=entry, splits=())
    return ServedEnvironment(name=name or snake_case(attribute), provider=provider, path=path)


def _located(package: str) -> str:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise MissingDependency(
            f"The package {package} is not installed in the interpreter of the environment service."
        )
    return str(Path(next(iter(spec.submodule_search_locations))).resolve())
