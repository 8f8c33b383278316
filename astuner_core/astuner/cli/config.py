"""``astuner config``: show and check experiment files; packages bring more of it (``config NAME``)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from astuner.cli import PluginSwitches, command_of_plugin, commands_of_plugins, load_plugins
from astuner.contracts.commands import (
    FileArgument,
    JsonOption,
    OverridesArgument,
    new_app,
    only_data_on_stdout,
    write_json,
)

if TYPE_CHECKING:
    from astuner.config import Config


class _Group(TyperGroup):
    """With the commands that packages add to this one."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *commands_of_plugins(ctx, "config ")]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return super().get_command(ctx, cmd_name) or command_of_plugin(ctx, cmd_name, "config ", self.commands)


app = new_app(cls=_Group, no_args_is_help=True, help="Show, check and explain experiment files.")

BackboneOption = Annotated[str | None, typer.Option("--backbone", metavar="NAME", help="Instead of the file's.")]


@app.command()
def show(
    ctx: typer.Context,
    file: FileArgument,
    overrides: OverridesArgument = None,
    origin: Annotated[bool, typer.Option("--origin", help="Say where each value comes from.")] = False,
    native: Annotated[
        bool, typer.Option("--native", help="What the backbone tells the engine underneath, in that engine's words.")
    ] = False,
    as_json: JsonOption = False,
    backbone: BackboneOption = None,
) -> None:
    """Print every setting of an experiment, defaults included and secrets removed."""
    config = _load(ctx, file, overrides, backbone)
    if native:
        if origin:
            raise typer.BadParameter("--native has no origins; leave one of the two out", param_hint="--origin")
        _print(_native(config), as_json)
    elif as_json and origin:
        write_json({key: {"value": value, "origin": where} for key, value, where in config.items()})
    elif origin:
        typer.echo(_with_origins(config))
    else:
        _print(config.as_dict(), as_json)


@app.command()
def check(
    ctx: typer.Context,
    file: FileArgument,
    overrides: OverridesArgument = None,
    as_json: JsonOption = False,
    backbone: BackboneOption = None,
) -> None:
    """Find every mistake in an experiment, in keys, model, workflow, judge and data; exits with 1 when there are any.

    It loads the workflow and the judge, reads the tasks and the model's configuration, and no weights. What cannot be
    checked here, since it is to be fetched, it says.
    """
    from astuner.contracts.errors import ConfigError
    from astuner.runs.preflight import Preflight

    found, tasks = None, None
    with only_data_on_stdout(True):  # the user's code may print while it is loaded
        disabled = PluginSwitches.of(ctx).disabled_plugins
        try:
            found = Preflight(file, overrides or (), backbone=backbone, disabled_plugins=disabled, only_look=True)
            found.parts()
            tasks = found.tasks(dry_run=True)
            mistakes = found.mistakes.told
        except ConfigError as e:  # so wrong that nothing else can be looked at
            mistakes = list(e.problems)
    notes, unchecked = (found.notes, found.unchecked) if found else ([], [])
    name = found.config.astuner.backbone if found else backbone
    if as_json:
        about = {"file": str(file), "backbone": name, "mistakes": mistakes, "not_checked": unchecked, "notes": notes}
        write_json(about)
    else:
        for line in (*notes, *(f"not checked: {text}" for text in unchecked), *mistakes):
            typer.echo(line)
        read = f"; {len(tasks.train)} tasks to train on, {len(tasks.validation)} held out" if tasks else ""
        verdict = f"{len(mistakes)} mistake{'s' * (len(mistakes) > 1)}" if mistakes else f"no mistake{read}"
        typer.echo(f"{file}{f' with the backbone {name!r}' if name else ''}: {verdict}")
    if mistakes:
        raise typer.Exit(1)


def _load(ctx: typer.Context, file: Path, overrides: list[str] | None, backbone: str | None) -> Config:
    from astuner.config import load_config

    return load_config(file, overrides or (), backbone=backbone, plugins=load_plugins(ctx))


def _native(config: Config) -> Mapping[str, Any]:
    """What the backbone tells its engine, secrets removed; refused like a run where it would ignore keys."""
    from astuner.contracts.secrets import redact
    from astuner.runs.serving import find_backbone

    backbone, _ = find_backbone(config)
    clean: dict[str, Any] = redact(backbone.native(), {})
    return clean


def _print(settings: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        write_json(settings)
    else:
        typer.echo(_yaml(settings, width=120).rstrip())


def _yaml(settings: Mapping[str, Any], width: int = 10_000) -> str:
    import yaml

    return yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True, width=width)


def _with_origins(config: Config) -> str:
    """The settings as YAML, with each key's origin as a comment."""
    from astuner.config.reading import read_text
    from astuner.contracts.places import Report

    text = _yaml(config.as_dict())
    places = read_text(text, "", Report("")).places
    lines = text.splitlines()
    width = min(max(map(len, lines)), 60)
    for key, _, origin in config.items():
        at = places[tuple(key.split("."))].line - 1
        lines[at] = f"{lines[at]:<{width}}  # {origin}"
    return "\n".join(lines)
