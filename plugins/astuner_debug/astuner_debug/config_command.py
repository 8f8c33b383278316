"""``astuner config``: show, check and explain experiment files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from astuner import Preflight, find_backbone, load_config
from astuner.contracts.commands import (
    FileArgument,
    JsonOption,
    OverridesArgument,
    command_line,
    new_app,
    only_data_on_stdout,
    write_json,
)
from astuner.contracts.errors import ConfigError
from astuner.contracts.secrets import redact
from astuner_debug.explain_command import explain, schema

if TYPE_CHECKING:
    from astuner import Config

app = new_app(no_args_is_help=True, help="Show, check and explain experiment files.")
app.command()(explain)
app.command()(schema)

BackboneOption = Annotated[
    str | None, typer.Option("--backbone", metavar="NAME", help="Use this backbone instead of the file's.")
]


@app.command()
def show(
    ctx: typer.Context,
    file: FileArgument,
    overrides: OverridesArgument = None,
    origin: Annotated[bool, typer.Option("--origin", help="Show where each value comes from.")] = False,
    native: Annotated[
        bool, typer.Option("--native", help="Show the configuration that the backbone passes to its engine.")
    ] = False,
    as_json: JsonOption = False,
    backbone: BackboneOption = None,
) -> None:
    """Print all settings of an experiment, including defaults; secrets are removed."""
    config = load_config(file, overrides or (), backbone=backbone, plugins=command_line(ctx).plugins)
    if native:
        if origin:
            raise typer.BadParameter("--native has no origins; remove --native or --origin", param_hint="--origin")
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
    """Check an experiment's keys, model, workflow, judge and data. Exit with status 1 if there are mistakes.

    Loads the workflow and the judge, and reads the tasks and the model's configuration, but no weights. Lists checks
    that need a download as "not checked".
    """
    found, tasks = None, None
    with only_data_on_stdout(True):  # the user's code may print while it is loaded
        disabled = command_line(ctx).disabled_plugins
        try:
            found = Preflight(file, overrides or (), backbone=backbone, disabled_plugins=disabled, only_look=True)
            found.parts()
            tasks = found.tasks(dry_run=True)
            mistakes = found.mistakes.told
        except ConfigError as e:  # too broken for further checks
            mistakes = list(e.problems)
    notes, unchecked, warnings = (found.notes, found.unchecked, found.warnings) if found else ([], [], [])
    name = found.config.astuner.backbone if found else backbone
    if as_json:
        about = {"file": str(file), "backbone": name, "mistakes": mistakes, "warnings": warnings}
        write_json(about | {"not_checked": unchecked, "notes": notes})
    else:
        doubts = (*(f"not checked: {text}" for text in unchecked), *(f"warning: {text}" for text in warnings))
        for line in (*notes, *doubts, *mistakes):
            typer.echo(line)
        read = f"; {tasks.counts(noun='tasks')}" if tasks else ""
        verdict = f"{len(mistakes)} mistake{'s' * (len(mistakes) > 1)}" if mistakes else f"no mistake{read}"
        verdict += f"; {len(warnings)} warning{'s' * (len(warnings) > 1)}" if warnings else ""
        typer.echo(f"{file}{f' with the backbone {name!r}' if name else ''}: {verdict}")
    if mistakes:
        raise typer.Exit(1)


def _native(config: Config) -> Mapping[str, Any]:
    """Return the engine's configuration without secrets; refuse keys that the backbone ignores, as a run does."""
    backbone, _ = find_backbone(config)
    clean: dict[str, Any] = redact(backbone.native(), {})
    return clean


def _print(settings: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        write_json(settings)
    else:
        typer.echo(_yaml(settings, width=120).rstrip())


def _yaml(settings: Mapping[str, Any], width: int = 10_000) -> str:
    return yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True, width=width)


def _with_origins(config: Config) -> str:
    """Return the settings as YAML, with the origin of each key as a comment."""
    text = _yaml(config.as_dict())
    line_of = dict(_lines(yaml.compose(text)))
    lines = text.splitlines()
    width = min(max(map(len, lines)), 60)
    for key, _, origin in config.items():
        at = line_of[tuple(key.split("."))]
        lines[at] = f"{lines[at]:<{width}}  # {origin}"
    return "\n".join(lines)


def _lines(node: yaml.Node | None, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield each key below a mapping with its line number, counted from 0."""
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        yield (*above, key.value), key.start_mark.line
        yield from _lines(value, (*above, key.value))
