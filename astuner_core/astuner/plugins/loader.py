"""Find, load and list plugins.

pluggy's ``load_setuptools_entrypoints`` stops at the first plugin that raises, silently drops a second plugin with the
same name, and does not check versions. So this module loads plugins one at a time. It records an error with the plugin
that caused it and continues with the next plugin.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pluggy

import astuner
from astuner import __version__
from astuner.contracts import hookspecs, installed
from astuner.contracts.errors import PluginError, UnknownName, told
from astuner.contracts.hookspecs import (
    KINDS,
    PROJECT,
    CommandProvider,
    EnvironmentProvider,
    LossProvider,
    Provider,
)
from astuner.contracts.interrupt import Interrupt, StoppedAtOnce
from astuner.contracts.parts import PARTS
from astuner.plugins.user_code import close_name

_toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

CORE = "astuner-core"
BUILTIN = ("core", "astuner.builtin")
"""The plugin of the core, registered through the same hooks as all others."""
DISABLE_PLUGINS = "ASTUNER_DISABLE_PLUGINS"
"""Environment variable with the names of plugins to disable, separated by commas."""
TRACE_VARIABLE = "ASTUNER_TRACE_PLUGINS"
_CLASSES: Mapping[str, type[Provider]] = {
    "command": CommandProvider,
    "environment": EnvironmentProvider,
    "loss": LossProvider,
}
"""Kind -> class of its providers, for kinds with more fields than `Provider`."""
Aliases = Mapping[tuple[str, str], Sequence[str]]
"""(kind, name) -> its legacy names."""


class PluginStatus(str, Enum):
    """Result of loading an installed plugin."""

    LOADED = "loaded"
    DISABLED = "disabled"
    BROKEN = "broken"
    INCOMPATIBLE = "incompatible"
    DUPLICATE = "duplicate"


@dataclass
class Plugin:
    """An installed plugin, loaded or not."""

    name: str
    dist: str
    version: str
    module_name: str
    status: PluginStatus = PluginStatus.LOADED
    reason: str = ""
    """Why the plugin is not loaded; empty if it is."""
    module: ModuleType | None = field(default=None, repr=False)
    provides: dict[str, dict[str, Provider]] = field(default_factory=dict)
    """Kind -> name -> provider."""


@lru_cache(maxsize=8)
def _cached(disabled: frozenset[str]) -> PluginManager:
    return PluginManager(disabled).load()


def load_plugins(disabled: Iterable[str] = ()) -> PluginManager:
    """Return the built-in and installed plugins, loaded once per process and set of disabled names.

    :param disabled: Plugin or distribution names to disable, in addition to the names in ``ASTUNER_DISABLE_PLUGINS``
        (separated by commas or spaces; Ray workers inherit the variable).
    """
    from_environment = re.split(r"[,\s]+", os.environ.get(DISABLE_PLUGINS, ""))
    return _cached(frozenset(name for name in (*disabled, *from_environment) if name))


class PluginManager:
    """The installed plugins and their providers."""

    def __init__(self, disabled: Iterable[str] = ()) -> None:
        self._pm = pluggy.PluginManager(PROJECT)
        self._pm.add_hookspecs(hookspecs)
        if os.environ.get(TRACE_VARIABLE, "") not in ("", "0"):
            self._pm.trace.root.setwriter(sys.stderr.write)
            self._pm.enable_tracing()
        self.disabled = frozenset(disabled)
        self.plugins: list[Plugin] = []
        self._aliases: list[Aliases] = []

    def __reduce__(self) -> tuple[Callable[[Iterable[str]], PluginManager], tuple[tuple[str, ...]]]:
        """Pickle the names of disabled plugins only; the other process loads its own installed plugins."""
        return load_plugins, (tuple(sorted(self.disabled)),)

    def load(self, entry_points: Iterable[importlib.metadata.EntryPoint] | None = None) -> PluginManager:
        """Load the built-in plugin and all installed ones. Errors of a plugin are recorded, not raised.

        :param entry_points: Load only these plugins.
        """
        if entry_points is None:
            name, module = BUILTIN
            plugin = Plugin(name, CORE, __version__, module)
            if not self._is_disabled(plugin):
                self._try(plugin, lambda: importlib.import_module(module))
            entry_points = installed.readable(PROJECT)
            for place, error in installed.broken.items():
                name = Path(place).name.partition("-")[0]
                if not self._is_disabled(plugin := Plugin(name, name, "", "")):
                    reason = f"{place} cannot be read ({told(error)}); reinstall the package, or remove that folder"
                    self._skip(plugin, PluginStatus.BROKEN, reason)
        taken = {plugin.name: {plugin.dist} for plugin in self.plugins}
        found = sorted(((ep, ep.dist) for ep in entry_points if ep.dist), key=lambda f: (f[0].name, f[1].name))
        for ep, dist in found:
            taken.setdefault(ep.name, set()).add(dist.name)
        for ep, dist in found:
            plugin = Plugin(ep.name, dist.name, dist.version, ep.value)
            twins = taken[ep.name] - {dist.name} - self.disabled
            if self._is_disabled(plugin):
                continue
            if twins:
                also = " and ".join(sorted(twins))
                reason = f"{also} uses the same plugin name {ep.name!r}; disable one of them, e.g. -p no:{dist.name}"
                self._skip(plugin, PluginStatus.DUPLICATE, reason)
            elif reason := _incompatible(dist):
                self._skip(plugin, PluginStatus.INCOMPATIBLE, reason)
            else:
                self._try(plugin, ep.load)
        for aliases in self._aliases:
            self._add_aliases(aliases)
        return self

    def offers(self, kind: str) -> Iterator[tuple[Plugin, str, Provider]]:
        """Yield plugin, name and provider of everything of one kind, in the order of loading."""
        for plugin in self.plugins:
            for name, provider in plugin.provides.get(kind, {}).items():
                yield plugin, name, provider

    def check_disabled(self, names: Iterable[str]) -> None:
        """Check that each name in ``names``, which the user disabled, exists.

        :raises UnknownName: A name does not exist. The message suggests a similar one or lists all.
        """
        known = sorted({n for plugin in self.plugins for n in (plugin.name, plugin.dist)})
        for name in sorted(set(names) - set(known)):
            close = close_name(name, known) or f"; installed: {', '.join(known)}"
            raise UnknownName(f"-p no:{name}: unknown plugin or distribution {name!r}{close}")

    @property
    def hook(self) -> pluggy.HookRelay:
        """Return pluggy's hooks, e.g. ``hook.locate_model(path=...)``."""
        return self._pm.hook

    def _is_disabled(self, plugin: Plugin) -> bool:
        if off := {plugin.name, plugin.dist} & self.disabled:
            self._skip(plugin, PluginStatus.DISABLED, f"by -p no:{sorted(off)[0]} or {DISABLE_PLUGINS}")
        return bool(off)

    def _try(self, plugin: Plugin, load: Callable[[], Any]) -> None:
        try:
            # A KeyboardInterrupt raised by the plugin is not the user's Ctrl-C, and its output is not a command's.
            with Interrupt(requested=True).listening(), redirect_stdout(sys.stderr):
                self._add(plugin, load())
        except StoppedAtOnce:
            raise
        except BaseException as e:  # third-party code may raise anything while it is imported
            if self._pm.has_plugin(plugin.name):
                self._pm.unregister(name=plugin.name)
            self._skip(plugin, PluginStatus.BROKEN, told(e))

    def _add(self, plugin: Plugin, module: ModuleType) -> None:
        described, aliases = _described(module)
        self._pm.register(module, name=plugin.name)
        for caller in self._pm.get_hookcallers(module) or ():
            if not caller.has_spec():
                raise PluginError(f"implements {caller.name!r}, which is not a hook of {CORE} {__version__}")
        others = [p.module for p in self.plugins if p.module is not None]
        for kind, hook in KINDS.items():
            for offered in (*described.get(kind, ()), *self._pm.subset_hook_caller(hook, others)()):
                _check(hook, offered)
                plugin.provides.setdefault(kind, {}).update(offered)
        all_aliases = [aliases, *self._pm.subset_hook_caller("register_aliases", others)()]
        _ = ["".join(more) for each in all_aliases for (_, _), more in each.items()]  # raises unless all are strings
        self._aliases += all_aliases
        plugin.module = module
        self.plugins.append(plugin)

    def _add_aliases(self, aliases: Aliases) -> None:
        for (kind, name), more in aliases.items():
            for plugin in self.plugins:
                if (found := plugin.provides.get(kind, {}).get(name)) is not None:
                    plugin.provides[kind][name] = replace(found, aliases=(*found.aliases, *more))

    def _skip(self, plugin: Plugin, status: PluginStatus, reason: str) -> None:
        plugin.status, plugin.reason, plugin.provides = status, reason, {}
        self.plugins.append(plugin)


def _described(module: ModuleType) -> tuple[Mapping[str, Sequence[Mapping[str, Provider]]], Aliases]:
    """Read the providers in the file ``plugin.toml`` next to a plugin's module (`astuner.contracts.hookspecs`).

    :returns: Kind -> at most one mapping of providers; and legacy names of other plugins' objects.
    :raises PluginError: The file cannot be read or has an unknown table or key. The message names it.
    """
    beside = getattr(module, "__file__", None)
    if not beside or not (file := Path(beside).with_name("plugin.toml")).exists():
        return {}, {}
    try:
        tables = _toml.loads(file.read_text(encoding="utf-8"))
    except ValueError as e:  # not TOML, or not UTF-8
        raise PluginError(f"{file}: {e}") from e
    older: Mapping[str, Mapping[str, Sequence[str]]] = tables.pop("aliases", {})
    kinds = {kind.replace(" ", "_"): kind for kind in KINDS}
    if unknown := {*tables, *older} - kinds.keys():
        raise PluginError(f"{file}: unknown kind {', '.join(sorted(unknown))}; use one of {', '.join(kinds)}")
    offers = {
        kinds[kind]: [{name: _provider(f"{file}: [{kind}.{name}]", kinds[kind], of) for name, of in offered.items()}]
        for kind, offered in tables.items()
    }
    return offers, {(kinds[kind], name): more for kind, names in older.items() for name, more in names.items()}


def _provider(place: str, kind: str, described: Any) -> Provider:
    cls = _CLASSES.get(kind, Provider)
    known = [f.name for f in fields(cls)]
    if not isinstance(described, Mapping) or "target" not in described:
        raise PluginError(f'{place}: target is missing; add target = "package.module:attribute"')
    for name in described.keys() - known:
        hint = close_name(name, known) or f"; known keys: {', '.join(known)}"
        raise PluginError(f"{place}: unknown key {name!r}{hint}")
    told: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in described.items()}
    return cls(**told)


def _check(hook: str, offered: object) -> None:
    if not isinstance(offered, Mapping) or not all(isinstance(p, Provider) for p in offered.values()):
        raise PluginError(f"{hook}() must return a dict of name -> Provider, not {offered!r}")
    for name, provider in offered.items():
        if not isinstance(name, str) or not name or "/" in name:
            raise PluginError(f"{hook}() returns the name {name!r}; a name must not be empty or contain '/'")
        if hook == KINDS["part"] and name not in PARTS:  # the core would never use it
            hint = close_name(name, PARTS) or f"; use one of {', '.join(PARTS)}"
            raise PluginError(f"{hook}() returns the unknown part {name!r}{hint}")
        "".join((*provider.requires, *provider.conflicts, *provider.aliases))  # raises unless all are strings
        for what, target in (("target", provider.target), ("config", provider.config or "a:b")):
            module, _, attribute = target.partition(":")
            if not module or not attribute.isidentifier():
                raise PluginError(f"{hook}()[{name!r}].{what} is {target!r}; write 'package.module:attribute'")


def _incompatible(dist: importlib.metadata.Distribution) -> str:
    """Return why a plugin is incompatible with the installed core, or an empty string.

    pip checks this too, but not with ``--no-deps``, which is common for training engines.
    """
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name

    for text in dist.requires or ():
        try:
            need = Requirement(text)
        except InvalidRequirement:
            return f"its requirement {text!r} is invalid"
        if canonicalize_name(need.name) == CORE and not need.specifier.contains(__version__, prereleases=True):
            return f"needs {CORE}{need.specifier}, but {__version__} is installed"
    return ""


if not TYPE_CHECKING:
    __getattr__ = astuner.older_names(__name__)
