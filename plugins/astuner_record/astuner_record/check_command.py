"""Command ``astuner check``: check an experiment before training."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from astuner.contracts.commands import (
    OverridesArgument,
    all_overrides,
    command_line,
    new_app,
    only_data_on_stdout,
    write_json,
)
from astuner.contracts.errors import ConfigError

app = new_app(no_args_is_help=True, help="Check that an agent keeps tokens exact, without a GPU.")

EXIT_NOT_EXACT = 1


class Tools(str, Enum):
    """Whether the check offers the agent's tools."""

    ON = "on"
    OFF = "off"
    BOTH = "both"


@app.callback()
def group() -> None:
    """Check that an agent keeps tokens exact, without a GPU."""


@app.command()
def tokens(
    ctx: typer.Context,
    target: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG|TRACE",
            help="Experiment file, or recorded conversations (.jsonl) such as a run's episodes/step_000001.jsonl.",
            show_default=False,
        ),
    ] = None,
    overrides: OverridesArgument = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME|DIR", help="Tokenizer for recorded conversations. Default: the run's.")
    ] = None,
    templates: Annotated[
        list[Path] | None,
        typer.Option("--template", metavar="FILE", help="Also try this Jinja chat template, or hermes (repeatable)."),
    ] = None,
    tools: Annotated[
        Tools | None, typer.Option(help="Check with the agent's tools, without them, or both. Default: as configured.")
    ] = None,
    scenarios: Annotated[
        list[str] | None, typer.Option("--scenario", metavar="NAME", help="Run only this scenario (repeatable).")
    ] = None,
    tasks: Annotated[int, typer.Option(min=1, metavar="N", help="Run the first N training tasks.")] = 1,
    allow: Annotated[
        list[str] | None, typer.Option(metavar="REASON", help="Do not count this reason as a failure (repeatable).")
    ] = None,
    list_scenarios: Annotated[bool, typer.Option("--list", help="List the scenarios and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON to stdout, everything else to stderr.")] = False,
) -> None:
    """Check turn by turn whether an agent's requests continue exactly. Exit with code 1 if one does not."""
    if list_scenarios:
        _list(as_json)
        return
    if target is None:
        raise ConfigError("No experiment file or recording is given. Run: astuner check tokens FILE")
    from astuner_record.token_check.report import check_allowed

    allowed = list(allow or ())
    check_allowed(allowed)
    on_or_off = {None: (), Tools.ON: (True,), Tools.OFF: (False,), Tools.BOTH: (True, False)}[tools]
    with only_data_on_stdout(True):  # agents may print
        from astuner import load_config
        from astuner_record.token_check.checks import check_config, check_trace

        plugins = command_line(ctx).plugins
        if target.suffix in (".jsonl", ".json"):
            for name, value in {"overrides": overrides, "scenario": scenarios}.items():
                if value:
                    raise ConfigError(f"{target} is a recording. {name} applies to experiments only: remove it.")
            resolved = target.absolute().parent.parent / "resolved.yaml"  # in the run folder, next to episodes/
            config = load_config(resolved, plugins=plugins) if model is None and resolved.is_file() else None
            report = check_trace(
                target, model=model, config=config, templates=templates or [], tools=on_or_off, plugins=plugins
            )
        else:
            if model is not None:
                raise ConfigError("--model applies to recordings only; for an experiment, pass astuner.model.path=NAME")
            config = load_config(target, all_overrides(overrides), plugins=plugins)
            report = check_config(
                config, templates=templates or [], tools=on_or_off, scenarios=scenarios or [], tasks=tasks
            )
    if as_json:
        write_json(report.as_dict(allowed))
    else:
        typer.echo(report.text(allowed))
    if report.problems(allowed):
        raise typer.Exit(EXIT_NOT_EXACT)


def _list(as_json: bool) -> None:
    from astuner_record.token_check.scripted import SCENARIOS

    if as_json:
        write_json({scenario.name: scenario.summary for scenario in SCENARIOS.values()})
        return
    width = max(map(len, SCENARIOS))
    for scenario in SCENARIOS.values():
        typer.echo(f"{scenario.name:<{width}}  {scenario.summary}")
