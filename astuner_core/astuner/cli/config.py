"""``astuner config``: show, check and explain experiment files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from astuner.cli.common import PluginSwitches, load_plugins
from astuner.contracts.commands import only_data_on_stdout, write_json

if TYPE_CHECKING:
    from astuner.config import Config
    from astuner.config.explain import KeyInfo

app = typer.Typer(
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
    help="Show, check and explain experiment files.",
)

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="The experiment file.", show_default=False)]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Override keys, e.g. astuner.seed=1.", show_default=False),
]
BackboneOption = Annotated[str | None, typer.Option("--backbone", metavar="NAME", help="Instead of the file's.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


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
        from astuner.config.explain import with_origins

        typer.echo(with_origins(config))
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


@app.command()
def schema(ctx: typer.Context) -> None:
    """Print a JSON schema of experiment files, for editors."""
    from astuner.config.explain import json_schema

    typer.echo(json.dumps(json_schema(load_plugins(ctx)), indent=2, ensure_ascii=False, default=str))


@app.command()
def explain(
    ctx: typer.Context,
    key: Annotated[str, typer.Argument(metavar="KEY", help="For example rollout.num_repeat.", show_default=False)],
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="Also say its value there.", show_default=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what a key means, what may be written, and who honours it."""
    from astuner.config.explain import explain as explain_key

    config = _load(ctx, file, None, None) if file is not None else None
    info = explain_key(key, load_plugins(ctx), config)
    if as_json:
        write_json(vars(info))
    else:
        typer.echo("\n".join(_lines(info)))


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
        return
    import yaml

    typer.echo(yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True, width=120).rstrip())


def _lines(info: KeyInfo) -> list[str]:
    lines = [info.key, f"  {info.doc}" if info.doc else "", f"  {info.type}"]
    if info.keys:
        lines.append(f"  keys: {', '.join(info.keys)}")
    else:
        lines.append("  required" if info.required else f"  default: {_shown(info.default)}")
    if info.origin:
        lines.append(f"  here: {_shown(info.value)}  ({info.origin})")
    if info.honoured_by:
        lines.append(f"  honoured by: {', '.join(info.honoured_by)}")
    return [line for line in lines if line]


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
