"""Find, load and list plugins.

pluggy's own ``load_setuptools_entrypoints`` stops at the first plugin that raises, drops a second plugin of the same
name without a word, and asks nothing about versions.  So the loading is done here, one plugin at a time: whatever
goes wrong is written down next to the plugin it went wrong in, and never touches another one.
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
from astuner.contracts.hookspecs import KINDS, PROJECT, EnvironmentProvider, LossProvider, Provider
from astuner.contracts.interrupt import Interrupt, StoppedAtOnce
from astuner.contracts.parts import PARTS
from astuner.plugins.user_code import close_name

_toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

CORE = "astuner-core"
BUILTIN = ("core", "astuner.builtin")
"""The plugin that the core itself registers, through the same hooks as anybody."""
DISABLE_PLUGINS = "ASTUNER_DISABLE_PLUGINS"
TRACE_VARIABLE = "ASTUNER_TRACE_PLUGINS"
_CLASSES: Mapping[str, type[Provider]] = {"environment": EnvironmentProvider, "loss": LossProvider}
"""Kind -> what describes it, if that is more than a `Provider`."""
Aliases = Mapping[tuple[str, str], Sequence[str]]
"""(kind, name) -> older names of it."""


class PluginStatus(str, Enum):
    """What became of an installed plugin."""

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
    """Why it is not loaded; empty when it is."""
    module: ModuleType | None = field(default=None, repr=False)
    provides: dict[str, dict[str, Provider]] = field(default_factory=dict)
    """Kind -> name -> provider."""


@lru_cache(maxsize=8)
def _cached(disabled: frozenset[str]) -> PluginManager:
    return PluginManager(disabled).load()


def load_plugins(disabled: Iterable[str] = ()) -> PluginManager:
    """The built-in and the installed plugins; loaded once per process and set of disabled names.

    :param disabled: plugin or distribution names to leave out, besides those in ``ASTUNER_DISABLE_PLUGINS``
        (separated by commas or spaces; Ray workers inherit it).
    """
    from_environment = re.split(r"[,\s]+", os.environ.get(DISABLE_PLUGINS, ""))
    return _cached(frozenset(name for name in (*disabled, *from_environment) if name))


class PluginManager:
    """The installed plugins and what they provide."""

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
        """Goes to another process as the names that are off: the others are found there anew."""
        return load_plugins, (tuple(sorted(self.disabled)),)

    def load(self, entry_points: Iterable[importlib.metadata.EntryPoint] | None = None) -> PluginManager:
        """Load the built-in plugin and every installed one; never raises because of one of them.

        :param entry_points: load these instead, and not the built-in one.
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
                    reason = f"{place} cannot be read ({told(error)}); install it anew, or remove that folder"
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
                reason = f"{also} is also called {ep.name!r}; turn one off with -p no:{dist.name}"
                self._skip(plugin, PluginStatus.DUPLICATE, reason)
            elif reason := _incompatible(dist):
                self._skip(plugin, PluginStatus.INCOMPATIBLE, reason)
            else:
                self._try(plugin, ep.load)
        for aliases in self._aliases:
            self._add_aliases(aliases)
        return self

    def offers(self, kind: str) -> Iterator[tuple[Plugin, str, Provider]]:
        """Everything of one kind, in the order the plugins were loaded."""
        for plugin in self.plugins:
            for name, provider in plugin.provides.get(kind, {}).items():
                yield plugin, name, provider

    def check_disabled(self, names: Iterable[str]) -> None:
        """Whether each of ``names``, which a person asked to turn off, is there to be turned off.

        :raises UnknownName: one is not; says what is close, or what there is.
        """
        known = sorted({n for plugin in self.plugins for n in (plugin.name, plugin.dist)})
        for name in sorted(set(names) - set(known)):
            close = close_name(name, known) or f"; there are {', '.join(known)}"
            raise UnknownName(f"-p no:{name}: no plugin or distribution is called {name!r}{close}")

    @property
    def hook(self) -> pluggy.HookRelay:
        """The questions with one answer, such as ``hook.locate_model(path=…)``."""
        return self._pm.hook

    def _is_disabled(self, plugin: Plugin) -> bool:
        if off := {plugin.name, plugin.dist} & self.disabled:
            self._skip(plugin, PluginStatus.DISABLED, f"by -p no:{sorted(off)[0]} or {DISABLE_PLUGINS}")
        return bool(off)

    def _try(self, plugin: Plugin, load: Callable[[], Any]) -> None:
        try:
            # Its own KeyboardInterrupt is none of the person's, and what it prints is no answer of a command.
            with Interrupt(requested=True).listening(), redirect_stdout(sys.stderr):
                self._add(plugin, load())
        except StoppedAtOnce:
            raise
        except BaseException as e:  # a plugin's import runs a stranger's code, which may raise anything
            if self._pm.has_plugin(plugin.name):
                self._pm.unregister(name=plugin.name)
            self._skip(plugin, PluginStatus.BROKEN, told(e))

    def _add(self, plugin: Plugin, module: ModuleType) -> None:
        described, aliases = _described(module)
        self._pm.register(module, name=plugin.name)
        for caller in self._pm.get_hookcallers(module) or ():
            if not caller.has_spec():
                raise PluginError(f"it implements {caller.name!r}, which is not a hook of {CORE} {__version__}")
        others = [p.module for p in self.plugins if p.module is not None]
        for kind, hook in KINDS.items():
            for offered in (*described.get(kind, ()), *self._pm.subset_hook_caller(hook, others)()):
                _check(hook, offered)
                plugin.provides.setdefault(kind, {}).update(offered)
        all_aliases = [aliases, *self._pm.subset_hook_caller("register_aliases", others)()]
        _ = ["".join(more) for each in all_aliases for (_, _), more in each.items()]  # raises unless they are texts
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
    """What the file ``plugin.toml`` beside a plugin's module says that it offers (`astuner.contracts.hookspecs`).

    :returns: kind -> what the file offers of it, at most one mapping; and older names of what others offer.
    :raises PluginError: the file cannot be read, or something in it stands for nothing; says where.
    """
    beside = getattr(module, "__file__", None)
    if not beside or not (file := Path(beside).with_name("plugin.toml")).exists():
        return {}, {}
    try:
        tables = _toml.loads(file.read_text(encoding="utf-8"))
    except ValueError as e:  # no TOML, or no UTF-8
        raise PluginError(f"{file}: {e}") from e
    older: Mapping[str, Mapping[str, Sequence[str]]] = tables.pop("aliases", {})
    kinds = {kind.replace(" ", "_"): kind for kind in KINDS}
    if unknown := {*tables, *older} - kinds.keys():
        raise PluginError(f"{file}: there is no kind {', '.join(sorted(unknown))}; there are {', '.join(kinds)}")
    offers = {
        kinds[kind]: [{name: _provider(f"{file}: [{kind}.{name}]", kinds[kind], of) for name, of in offered.items()}]
        for kind, offered in tables.items()
    }
    return offers, {(kinds[kind], name): more for kind, names in older.items() for name, more in names.items()}


def _provider(place: str, kind: str, described: Any) -> Provider:
    cls = _CLASSES.get(kind, Provider)
    known = [f.name for f in fields(cls)]
    if not isinstance(described, Mapping) or "target" not in described:
        raise PluginError(f'{place}: write target = "package.module:attribute" in this table')
    for name in described.keys() - known:
        raise PluginError(f"{place}: there is no {name!r}{close_name(name, known) or f'; there are {known}'}")
    told: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in described.items()}
    return cls(**told)


def _check(hook: str, offered: object) -> None:
    if not isinstance(offered, Mapping) or not all(isinstance(p, Provider) for p in offered.values()):
        raise PluginError(f"{hook}() must return a dict of name -> Provider, not {offered!r}")
    for name, provider in offered.items():
        if not isinstance(name, str) or not name or "/" in name:
            raise PluginError(f"{hook}() names something {name!r}; a name is not empty and has no '/'")
        if hook == KINDS["part"] and name not in PARTS:  # nothing would ever ask for it
            hint = close_name(name, PARTS) or f"; there are {', '.join(PARTS)}"
            raise PluginError(f"{hook}() names {name!r}, which is no part of the core{hint}")
        "".join((*provider.requires, *provider.conflicts, *provider.aliases))  # raises unless they are texts
        for what, target in (("target", provider.target), ("config", provider.config or "a:b")):
            module, _, attribute = target.partition(":")
            if not module or not attribute.isidentifier():
                raise PluginError(f"{hook}()[{name!r}].{what} is {target!r}; write 'package.module:attribute'")


def _incompatible(dist: importlib.metadata.Distribution) -> str:
    """Why this plugin does not go with the installed core, or an empty string.

    pip checks this too, but not under ``--no-deps``, which is how the training engines are often installed.
    """
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name

    for text in dist.requires or ():
        try:
            need = Requirement(text)
        except InvalidRequirement:
            return f"its requirement {text!r} cannot be read"
        if canonicalize_name(need.name) == CORE and not need.specifier.contains(__version__, prereleases=True):
            return f"needs {CORE}{need.specifier}, but {__version__} is installed"
    return ""


if not TYPE_CHECKING:
    __getattr__ = astuner.older_names(__name__)
