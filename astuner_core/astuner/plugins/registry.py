"""Resolve names of an experiment to objects.

A reference is a registered name, ``plugin/name``, a legacy name, or user code as ``package.module->Name`` or
``path/to/file.py->Name`` (``:`` is equivalent to ``->``). Objects are imported on first use, and error messages contain
the name or command to use instead.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import astuner
from astuner.contracts.errors import AmbiguousName, MissingDependency, PluginError, UnknownName, told
from astuner.contracts.hookspecs import KINDS, Provider
from astuner.contracts.parts import PARTS, EnvironmentsPart, OlderSpellingsPart
from astuner.plugins.loader import Plugin, PluginManager, PluginStatus
from astuner.plugins.user_code import close_name, find_user_file, import_user_code

CONTRACTS = {
    "task reader": "astuner.contracts.task_reader:TaskReader",
    "environment": "astuner.contracts.environment:Environment",
    "service": "astuner.contracts.service:Service",
    "backbone": "astuner.contracts.backbone:Backbone",
    "log sink": "astuner.contracts.log_sink:LogSink",
    "subscriber": "astuner.contracts.events:Subscriber",
    "config key": "astuner.contracts.section:Section",
}
"""Kind -> the base class of its objects.

Other kinds are checked elsewhere: parts by name (`astuner.contracts.parts.PARTS`); workflows, judges and output checks,
which may be functions, in `astuner.rollout.parts`; losses and advantage estimators in `astuner.rollout.credit`;
sentinel rules in `astuner_report`. A command is a `typer.Typer` or a function, a diagnosis a function.
"""


_OLDER = "environments for the legacy environment service require astuner-env: pip install astuner-env"
"""Hint for an environment that appears to be written for the legacy service, if no part adapts it."""


@dataclass(frozen=True)
class Offer:
    """A provider with its kind, name and plugin."""

    kind: str
    name: str
    plugin: Plugin
    provider: Provider
    unique: bool
    """Whether only this plugin registers the name."""

    @property
    def full_name(self) -> str:
        """Return an unambiguous name: the name, or ``plugin/name`` if several plugins register it."""
        return self.name if self.unique else f"{self.plugin.name}/{self.name}"

    @property
    def spellings(self) -> frozenset[str]:
        """Return all accepted names."""
        qualified = f"{self.plugin.name}/{self.name}"
        return frozenset({qualified, self.full_name, *self.provider.aliases})


def is_code(reference: str) -> bool:
    """Return whether a reference names code (``module->Name``) instead of a registered object."""
    return ":" in _colon(reference)


def offers(manager: PluginManager, kind: str) -> list[Offer]:
    """Return all providers of one kind, in the order of loading."""
    everything = list(manager.offers(kind))
    names = Counter(name for _, name, _ in everything)
    return [Offer(kind, name, plugin, provider, unique=names[name] == 1) for plugin, name, provider in everything]


def find_offer(manager: PluginManager, kind: str, reference: str) -> Offer:
    """Return the provider registered as ``reference``: a name, ``plugin/name``, or a legacy name.

    :raises UnknownName: The name is not registered. The message suggests a similar name or the package to install.
    :raises AmbiguousName: Several plugins register the name. The message lists the unambiguous names.
    """
    everything = offers(manager, kind)
    owner, _, bare = ("", "", reference) if is_code(reference) else reference.rpartition("/")
    matches = [o for o in everything if o.name == bare and owner in ("", o.plugin.name)]
    matches = matches or [o for o in everything if _colon(reference) in map(_colon, o.provider.aliases)]
    if len(matches) > 1:
        choices = " or ".join(f"{o.plugin.name}/{o.name}" for o in matches)
        raise AmbiguousName(f"{len(matches)} plugins register the {kind} {reference!r}; write {choices}")
    if not matches:
        raise UnknownName(_unknown(manager, kind, reference))
    return matches[0]


def find_provider(manager: PluginManager, kind: str, reference: str) -> Provider:
    """Return the provider registered as ``reference``; raises the errors of `find_offer`."""
    return find_offer(manager, kind, reference).provider


def resolve(manager: PluginManager, kind: str, reference: str, *, base_dir: Path | None = None) -> Any:
    """Import the object that ``reference`` names.

    :param base_dir: Folder of the experiment file, searched first for user code.
    :raises UnknownName: The name, file, module or attribute does not exist.
    :raises MissingDependency: A required package is not installed. The message contains the install command.
    :raises PluginError: The import failed, an installed package conflicts, or the object is not of this kind.
    """
    environments: EnvironmentsPart | None = None
    if kind == "environment" and (part := find_optional_part(manager, "environments")) is not None:
        environments = part()
        environments.prepare_import()  # files for the legacy service import modules that no longer exist
    provider = None
    if not is_code(reference) or find_user_file(reference, base_dir) is None:
        try:
            provider = find_provider(manager, kind, reference)
        except UnknownName:
            if not is_code(reference) or hint_for(kind, reference):
                raise
    if provider is None:
        found = _user_code(kind, reference, base_dir, environments)
    else:
        check_installed(kind, reference, provider)
        found = import_target(provider.target)
    return _of_kind(kind, reference, found, environments)


def find_part(manager: PluginManager, name: str, *, wanted_by: str) -> Any:
    """Return the class registered as the part ``name`` of `astuner.contracts.parts`.

    :param wanted_by: The feature that requires it, which starts the error message, e.g. ``"astuner.endpoint"``.
    :raises MissingDependency: No enabled package provides it. The message names the package or its error.
    :raises PluginError: Several packages provide it, or the registered class is not a subclass of the part's class.
    """
    found = find_optional_part(manager, name)
    if found is not None:
        return found
    raise MissingDependency(f"{wanted_by} needs the part {name!r}{_why_not_here(manager, hint_for('part', name))}")


def find_optional_part(manager: PluginManager, name: str) -> Any:
    """Return the part like `find_part`, or None if no enabled package provides it."""
    brought = [plugin.name for plugin, offered, _ in manager.offers("part") if offered == name]
    if not brought:
        return None
    if len(brought) > 1:
        choices = " or ".join(f"-p no:{plugin}" for plugin in brought)
        raise AmbiguousName(f"{len(brought)} plugins register the part {name!r}; disable one with {choices}")
    return resolve(manager, "part", f"{brought[0]}/{name}")


def older_spellings(manager: PluginManager) -> OlderSpellingsPart:
    """Return the part ``older_spellings``, or one without legacy keys if it is not installed."""
    found: OlderSpellingsPart = (find_optional_part(manager, "older_spellings") or OlderSpellingsPart)()
    return found


def check_installed(kind: str, name: str, provider: Provider) -> None:
    """Check that ``provider`` can be imported, without importing it.

    :raises PluginError: A distribution in its ``conflicts`` is installed. The message contains the commands for a
        separate environment.
    :raises MissingDependency: A module in its ``requires`` is missing.
    """
    for dist in provider.conflicts:
        try:
            version = importlib.metadata.version(dist)
        except (importlib.metadata.PackageNotFoundError, UnicodeDecodeError):
            continue
        own = f"python3 -m venv .venv-{name} && . .venv-{name}/bin/activate"
        install = f", then in it: {provider.install}" if provider.install else ""
        raise PluginError(
            f"the {kind} {name!r} cannot share an environment with {dist} {version}. Create a separate environment: "
            f"{own}{install}; or use only {name!r} here: pip uninstall {dist}"
        )
    for module in missing_modules(provider):
        hint = f"; install it: {provider.install}" if provider.install else ""
        raise MissingDependency(f"the {kind} {name!r} needs {module}, which is not installed{hint}")


def missing_modules(provider: Provider) -> list[str]:
    """Return required modules that are not installed. To look for ``a.b``, this imports ``a``."""
    return [module for module in provider.requires if not _is_there(module)]


def _is_there(module: str) -> bool:
    try:
        return module in sys.modules or importlib.util.find_spec(module) is not None
    except (Exception, SystemExit):  # the parent package is missing or cannot be imported
        return False


def import_target(target: str) -> Any:
    """Import a provider's ``"package.module:attribute"``.

    :raises PluginError: The module cannot be imported or does not have the attribute.
    """
    module_name, _, attribute = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as e:  # a plugin's module may raise anything
        raise PluginError(f"{target} cannot be imported: {told(e)}") from e
    try:
        return getattr(module, attribute)
    except AttributeError:
        hint = close_name(attribute, vars(module))
        raise UnknownName(f"{module_name} has no {attribute!r}{hint}") from None


@functools.cache
def known_plugins() -> Mapping[tuple[str, str], str]:
    """Return the first-party providers: (kind, name) -> distribution, so that errors can name a missing package."""
    import yaml

    packages = yaml.safe_load(Path(__file__).with_name("packages.yaml").read_text(encoding="utf-8"))
    return {(kind, name): dist for dist, kinds in packages.items() for kind, names in kinds.items() for name in names}


def hint_for(kind: str, reference: str) -> str | None:
    """Return the first-party distribution that provides ``reference``, or None."""
    return known_plugins().get((kind, reference)) or known_plugins().get((kind, _colon(reference)))


def _colon(reference: str) -> str:
    """Return a reference with ``:`` for ``->`` and the current name of the package."""
    text = reference.replace("->", ":")
    return f"astuner.{text[len('astune.') :]}" if text.startswith("astune.") else text


def _user_code(kind: str, reference: str, base_dir: Path | None, environments: EnvironmentsPart | None) -> Any:
    try:
        return import_user_code(reference, base_dir)
    except PluginError as e:
        wanted = e.__cause__.name or "" if isinstance(e.__cause__, ModuleNotFoundError) else ""
        if kind == "environment" and environments is None and wanted.partition(".")[0] == "env_service":
            raise PluginError(f"{e}; {_OLDER}") from e.__cause__
        raise


def _of_kind(kind: str, reference: str, found: Any, environments: EnvironmentsPart | None) -> Any:
    if kind == "part":
        contract = PARTS[reference.rpartition("/")[2]]
    elif kind in CONTRACTS:
        contract = import_target(CONTRACTS[kind])
    else:
        return found
    if isinstance(found, type):
        if issubclass(found, contract):
            return found
        if environments is not None and (adapted := environments.adapt(found)) is not None:
            return adapted
    hint = f"; {_OLDER}" if kind == "environment" and environments is None and hasattr(found, "get_init_state") else ""
    raise PluginError(f"the {kind} {reference!r} is {found!r}; it must be a subclass of {contract.__name__}{hint}")


def _unknown(manager: PluginManager, kind: str, reference: str) -> str:
    start = f"unknown {kind} {reference!r}"
    dist = hint_for(kind, reference)
    if why := _why_not_here(manager, dist, reference.partition("/")[0]):
        return start + why
    if reference.endswith(".py"):
        return f"{start}; to use a class or function of that file, write {reference}->NAME"
    known = sorted({name for _, name, _ in manager.offers(kind)})
    if hint := close_name(reference, known):
        return start + hint
    for other in KINDS:
        if any(name == reference for _, name, _ in manager.offers(other)):
            return f"{start}; this is the name of a {other}"
    return f"{start}; installed: {', '.join(known) or 'none'}"


def who_adds(manager: PluginManager, key: str) -> str:
    """Return the end of a message about an unknown key (without ``astuner.``) that a first-party package adds.

    Empty for all other keys.
    """
    dist = hint_for("config key", key)
    return _why_not_here(manager, dist) if dist else ""


def _why_not_here(manager: PluginManager, dist: str | None, name: str = "") -> str:
    """Return the end of a message: why an installed plugin is not loaded, or how to install the distribution.

    Empty if neither is known.

    :param dist: First-party distribution.
    :param name: Name of a plugin.
    """
    for plugin in manager.plugins:
        if plugin.status is not PluginStatus.LOADED and (plugin.dist == dist or plugin.name == name):
            which = f"the plugin {plugin.name} ({plugin.dist} {plugin.version})"
            return f": {which} is {plugin.status.value}: {plugin.reason}"
    return f"; install it: pip install {dist}" if dist else ""


if not TYPE_CHECKING:
    __getattr__ = astuner.older_names(__name__)
