"""From a name in the config to the object it stands for.

A reference is a registered name, ``plugin/name``, an older spelling of one, or code of the user's own as
``package.module->Name`` or ``path/to/file.py->Name`` (``:`` works like ``->``).  Nothing is imported before it is asked
for, and a failure says what to type instead.
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
"""The class that everything of a kind is a subclass of.

Not here: a part has a class for each name (`astuner.contracts.parts.PARTS`); workflow and judge may be functions, and
a judge may have ``compute_reward`` instead, as `astuner.rollout.parts` checks; output checks, losses and advantage
estimators are functions, as `astuner.rollout.parts` and `astuner.rollout.credit` see to; what a sentinel rule is, says
`astuner_report`; a command is a
`typer.Typer`, a diagnosis a function.
"""


_OLDER = "one that was written for an older environment service runs where astuner-env is: pip install astuner-env"
"""What is said of an environment that shows signs of that, where no part adapts it."""


@dataclass(frozen=True)
class Offer:
    """A provider, under the name it was found by."""

    kind: str
    name: str
    plugin: Plugin
    provider: Provider
    unique: bool
    """Whether no other plugin registers the same name."""

    @property
    def full_name(self) -> str:
        """What names exactly this one: its name, or ``plugin/name`` where another plugin has the same."""
        return self.name if self.unique else f"{self.plugin.name}/{self.name}"

    @property
    def spellings(self) -> frozenset[str]:
        """Everything that may be written for it."""
        qualified = f"{self.plugin.name}/{self.name}"
        return frozenset({qualified, self.full_name, *self.provider.aliases})


def is_code(reference: str) -> bool:
    """Whether a reference names code (``module->Name``) rather than something registered."""
    return ":" in _colon(reference)


def offers(manager: PluginManager, kind: str) -> list[Offer]:
    """Everything of one kind, in the order the plugins were loaded."""
    everything = list(manager.offers(kind))
    names = Counter(name for _, name, _ in everything)
    return [Offer(kind, name, plugin, provider, unique=names[name] == 1) for plugin, name, provider in everything]


def find_offer(manager: PluginManager, kind: str, reference: str) -> Offer:
    """What is registered as ``reference``: a name, ``plugin/name``, or an older spelling.

    :raises UnknownName: nothing is; says what is close, or which distribution brings it.
    :raises AmbiguousName: several plugins register it; says what to write.
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
    """The provider registered as ``reference``; raises as `find_offer`."""
    return find_offer(manager, kind, reference).provider


def resolve(manager: PluginManager, kind: str, reference: str, *, base_dir: Path | None = None) -> Any:
    """Import what ``reference`` names.

    :param base_dir: the experiment file's folder, where the user's own code is looked for first.
    :raises UnknownName: no such name, file, module or attribute.
    :raises MissingDependency: a package it needs is not installed; says how to install it.
    :raises PluginError: it raised when imported, conflicts with what is installed, or is not of this kind.
    """
    environments: EnvironmentsPart | None = None
    if kind == "environment" and (part := find_optional_part(manager, "environments")) is not None:
        environments = part()
        environments.prepare_import()  # a file for the older service imports what is not there
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
    """The class that is the part ``name`` of `astuner.contracts.parts`.

    :param wanted_by: what cannot do without it, as the beginning of the message: ``"astuner.endpoint"``.
    :raises MissingDependency: no package that is on brings it; says which one does, or what is wrong with it.
    :raises PluginError: several bring it, or what one of them brings is not that.
    """
    found = find_optional_part(manager, name)
    if found is not None:
        return found
    raise MissingDependency(f"{wanted_by} needs the part {name!r}{_why_not_here(manager, hint_for('part', name))}")


def find_optional_part(manager: PluginManager, name: str) -> Any:
    """The same, or None where no package that is on brings it; raises as `find_part` does where one does."""
    brought = [plugin.name for plugin, offered, _ in manager.offers("part") if offered == name]
    if not brought:
        return None
    if len(brought) > 1:
        choices = " or ".join(f"-p no:{plugin}" for plugin in brought)
        raise AmbiguousName(f"{len(brought)} plugins register the part {name!r}; turn one off with {choices}")
    return resolve(manager, "part", f"{brought[0]}/{name}")


def older_spellings(manager: PluginManager) -> OlderSpellingsPart:
    """The older keys that are read: the part of that name, or none."""
    found: OlderSpellingsPart = (find_optional_part(manager, "older_spellings") or OlderSpellingsPart)()
    return found


def check_installed(kind: str, name: str, provider: Provider) -> None:
    """Whether ``provider`` can be imported here, without importing it.

    :raises PluginError: one of its ``conflicts`` is installed; says how to give each an environment.
    :raises MissingDependency: one of its ``requires`` is missing.
    """
    for dist in provider.conflicts:
        try:
            version = importlib.metadata.version(dist)
        except (importlib.metadata.PackageNotFoundError, UnicodeDecodeError):
            continue
        own = f"python3 -m venv .venv-{name} && . .venv-{name}/bin/activate"
        install = f", then in it: {provider.install}" if provider.install else ""
        raise PluginError(
            f"the {kind} {name!r} cannot share an environment with {dist} {version}. Make it one of its own: "
            f"{own}{install}; or, to have {name!r} alone here: pip uninstall {dist}"
        )
    for module in missing_modules(provider):
        hint = f"; install it with: {provider.install}" if provider.install else ""
        raise MissingDependency(f"the {kind} {name!r} needs {module}, which is not installed{hint}")


def missing_modules(provider: Provider) -> list[str]:
    """Modules that a provider requires and that are not installed; of ``a.b``, ``a`` is imported to look for it."""
    return [module for module in provider.requires if not _is_there(module)]


def _is_there(module: str) -> bool:
    try:
        return module in sys.modules or importlib.util.find_spec(module) is not None
    except (Exception, SystemExit):  # what it is in is not there either, or cannot be imported
        return False


def import_target(target: str) -> Any:
    """Import a provider's ``"package.module:attribute"``.

    :raises PluginError: it cannot be imported, or has no such attribute.
    """
    module_name, _, attribute = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as e:  # a plugin's module may raise anything
        raise PluginError(f"{target} cannot be imported: {told(e)}") from e
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise UnknownName(f"{module_name} has no {attribute!r}{close_name(attribute, vars(module))}") from None


@functools.cache
def known_plugins() -> Mapping[tuple[str, str], str]:
    """First-party plugins: (kind, name) -> the distribution that brings it, so that a missing one can be named."""
    import yaml

    packages = yaml.safe_load(Path(__file__).with_name("packages.yaml").read_text(encoding="utf-8"))
    return {(kind, name): dist for dist, kinds in packages.items() for kind, names in kinds.items() for name in names}


def hint_for(kind: str, reference: str) -> str | None:
    """The distribution of ours that brings ``reference``, if one does."""
    return known_plugins().get((kind, reference)) or known_plugins().get((kind, _colon(reference)))


def _colon(reference: str) -> str:
    """One spelling for both ways to write code, and for the package's first name."""
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
    start = f"no {kind} is called {reference!r}"
    dist = hint_for(kind, reference)
    if why := _why_not_here(manager, dist, reference.partition("/")[0]):
        return start + why
    if reference.endswith(".py"):
        return f"{start}; to have what is in that file, name it: {reference}->NAME"
    known = sorted({name for _, name, _ in manager.offers(kind)})
    if hint := close_name(reference, known):
        return start + hint
    for other in KINDS:
        if any(name == reference for _, name, _ in manager.offers(other)):
            return f"{start}; that is a {other}"
    return f"{start}; installed: {', '.join(known) or 'none'}"


def who_adds(manager: PluginManager, key: str) -> str:
    """What is said of a key that nothing reads, without ``astuner.``, where a package of ours adds it; else nothing."""
    dist = hint_for("config key", key)
    return _why_not_here(manager, dist) if dist else ""


def _why_not_here(manager: PluginManager, dist: str | None, name: str = "") -> str:
    """Why a plugin, of a distribution of ours or of a name, is installed and not loaded, or how to install it; as the
    end of a message, which is empty where neither is known."""
    for plugin in manager.plugins:
        if plugin.status is not PluginStatus.LOADED and (plugin.dist == dist or plugin.name == name):
            which = f"the plugin {plugin.name} ({plugin.dist} {plugin.version})"
            return f": {which} is {plugin.status.value}: {plugin.reason}"
    return f"; it comes with {dist}: pip install {dist}" if dist else ""


if not TYPE_CHECKING:
    __getattr__ = astuner.older_names(__name__)
