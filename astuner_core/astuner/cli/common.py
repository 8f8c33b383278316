"""The plugins of a command line."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from astuner.contracts.errors import ConfigError

if TYPE_CHECKING:
    from astuner.plugins.loader import PluginManager


class PluginSwitches:
    """What ``-p no:NAME`` makes of the installed plugins; an `astuner.contracts.commands.CommandLine`.

    :raises ConfigError: ``-p`` with something else.
    :raises UnknownName: no plugin or distribution has such a name; raised when the plugins are loaded.
    """

    def __init__(self, given: Sequence[str]) -> None:
        wrong = next((text for text in given if not text.startswith("no:") or text == "no:"), None)
        if wrong is not None:
            raise ConfigError(f"-p {wrong}: plugins are installed with pip and turned off with -p no:NAME")
        self._names = tuple(text.removeprefix("no:") for text in given)

    @classmethod
    def of(cls, ctx: Any) -> PluginSwitches:
        """Those of a command line, given any `typer.Context` of it."""
        return cls(ctx.find_root().params.get("plugin") or ())

    @cached_property
    def plugins(self) -> PluginManager:
        from astuner.plugins import loader

        found = loader.load_plugins(self._names)
        found.check_disabled(self._names)
        return found

    @property
    def disabled_plugins(self) -> tuple[str, ...]:
        if self._names:
            _ = self.plugins  # whose names are checked
        return self._names

    def part(self, name: str, *, wanted_by: str) -> Any:
        from astuner.plugins import registry

        return registry.part(self.plugins, name, wanted_by=wanted_by)

    def check_services(self, names: Sequence[str]) -> None:
        if names:
            from astuner.runs import services

            services.check(self.plugins, names)


def load_plugins(ctx: Any) -> PluginManager:
    """The core's own and the installed plugins, without those that ``-p`` turns off."""
    return PluginSwitches.of(ctx).plugins
