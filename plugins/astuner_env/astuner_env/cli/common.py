"""What the commands of ``astuner env`` share."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from astuner.contracts.errors import ConfigError
from astuner.contracts.hookspecs import EnvironmentProvider
from astuner_env.providers import as_environment

if TYPE_CHECKING:
    from astuner.plugins.loader import PluginManager

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The environment.", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def offered(ctx: typer.Context) -> list[tuple[str, str, EnvironmentProvider]]:
    """Name, plugin, provider of every environment; with ``-p no:NAME`` honoured."""
    found = []
    for plugin, name, provider in load_plugins(ctx).offers("environment"):
        found.append((name, plugin.name, as_environment(provider)))
    return sorted(found, key=lambda row: row[:2])


def find(ctx: typer.Context, reference: str) -> tuple[str, EnvironmentProvider]:
    """The name that an environment goes by, and its provider.

    :raises UnknownName: there is no such environment; says what is close.
    :raises AmbiguousName: several plugins bring it; one of them must be turned off.
    """
    from astuner.plugins import registry

    found = registry.offer(load_plugins(ctx), "environment", reference)
    return found.name, as_environment(found.provider)


def load_plugins(ctx: typer.Context) -> PluginManager:
    from astuner.plugins import loader as plugins

    return plugins.load_plugins(disabled_plugins(ctx))


def disabled_plugins(ctx: typer.Context) -> tuple[str, ...]:
    """The names behind ``-p no:NAME``; that they are well-formed was checked when this command was looked up."""
    return tuple(text.removeprefix("no:") for text in ctx.find_root().params.get("plugin") or ())


def pairs(option: str, texts: Sequence[str]) -> Mapping[str, str]:
    wrong = [text for text in texts if not text.partition("=")[1] or text.startswith("=")]
    if wrong:
        raise ConfigError([f"{option or 'command line:'} {text!r} is not KEY=VALUE" for text in wrong])
    return {key: value for key, _, value in (text.partition("=") for text in texts)}


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def write_json(data: Any) -> None:
    print(json.dumps(data, ensure_ascii=False, indent=2))
