"""``astuner plugins``: list every installed plugin, and why a plugin was not loaded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from astuner.contracts.commands import command_line, write_json
from astuner.contracts.errors import ConfigError
from astuner.contracts.hookspecs import KINDS
from astuner.plugins.registry import missing_modules

if TYPE_CHECKING:
    from astuner.plugins.loader import Plugin


def plugins(
    ctx: typer.Context,
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="Show summaries, targets and missing packages.")
    ] = False,
    hook: Annotated[str | None, typer.Option(metavar="KIND", help="Show only one kind, e.g. judge.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 if a plugin could not be loaded.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List installed plugins and what they provide."""
    found = command_line(ctx).plugins.plugins
    kinds = [_kind(hook)] if hook else list(KINDS)
    shown = [p for p in found if p.status.value != "loaded" or not hook or p.provides.get(kinds[0])]
    if as_json:
        write_json([_as_data(p, kinds) for p in shown])
    else:
        _table(shown, kinds, verbose)
    if strict and any(p.status.value not in ("loaded", "disabled") for p in found):
        raise typer.Exit(1)


def _kind(text: str) -> str:
    """Return the kind for ``judge``, ``judges``, ``task-reader`` or ``register_judges``."""
    bare = text.removeprefix("register_").replace("-", " ").replace("_", " ")
    for kind in KINDS:
        if bare in (kind, f"{kind}s"):
            return kind
    raise ConfigError(f"--hook {text}: unknown kind; use one of {', '.join(KINDS)}")


def _as_data(plugin: Plugin, kinds: list[str]) -> dict[str, Any]:
    provides = {
        kind: {name: asdict(provider) | {"missing": missing_modules(provider)} for name, provider in offered.items()}
        for kind, offered in plugin.provides.items()
        if kind in kinds
    }
    return {
        "name": plugin.name,
        "dist": plugin.dist,
        "version": plugin.version,
        "module": plugin.module_name,
        "status": plugin.status.value,
        "reason": plugin.reason,
        "provides": provides,
        "models": _models(plugin),
    }


def _models(plugin: Plugin) -> list[str]:
    return list(getattr(plugin.module, "list_models", tuple)())


def _table(shown: list[Plugin], kinds: list[str], verbose: bool) -> None:
    if not shown:
        typer.echo("No enabled plugin provides this kind.")
        return
    name_width = max(len(p.name) for p in shown)
    dist_width = max(len(f"{p.dist} {p.version}") for p in shown)
    for p in shown:
        typer.echo(f"{p.name:{name_width}}  {f'{p.dist} {p.version}':{dist_width}}  {_what(p, kinds)}".rstrip())
        if verbose:
            for kind in kinds:
                for name, provider in p.provides.get(kind, {}).items():
                    typer.echo(f"{'':{name_width}}  {kind} {name}: {provider.summary}  [{provider.target}]")
                    if missing := missing_modules(provider):
                        typer.echo(f"{'':{name_width}}    needs {', '.join(missing)}: {provider.install}")


def _what(plugin: Plugin, kinds: list[str]) -> str:
    if plugin.status.value != "loaded":
        return f"{plugin.status.value.upper()}  {plugin.reason}"
    offered: dict[str, Iterable[str]] = {kind: plugin.provides.get(kind, ()) for kind in kinds}
    if len(kinds) > 1:
        offered["model"] = _models(plugin)
    return " · ".join(f"{kind}: {', '.join(names)}" for kind, names in offered.items() if names)
