"""``astuner check``: what can be known about an experiment before it costs anything."""

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
    """Whether the agent's tools are offered."""

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
            help="An experiment file, or recorded conversations (.jsonl), e.g. a run's episodes/step_000001.jsonl.",
            show_default=False,
        ),
    ] = None,
    overrides: OverridesArgument = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME|DIR", help="For a trace: whose tokenizer. Default: the run's own.")
    ] = None,
    templates: Annotated[
        list[Path] | None,
        typer.Option("--template", metavar="FILE", help="Also try this Jinja chat template, or hermes (repeatable)."),
    ] = None,
    tools: Annotated[
        Tools | None, typer.Option(help="With the agent's tools, without, or both. Default: as configured.")
    ] = None,
    scenarios: Annotated[
        list[str] | None, typer.Option("--scenario", metavar="NAME", help="Only this scenario (repeatable).")
    ] = None,
    tasks: Annotated[int, typer.Option(min=1, metavar="N", help="Run the first N training tasks.")] = 1,
    allow: Annotated[
        list[str] | None, typer.Option(metavar="REASON", help="Do not count this as a failure (repeatable).")
    ] = None,
    list_scenarios: Annotated[bool, typer.Option("--list", help="List the scenarios, and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; everything else goes to stderr.")] = False,
) -> None:
    """Say, turn by turn, whether an agent's requests continue exactly; exits with 1 when one does not."""
    if list_scenarios:
        _list(as_json)
        return
    if target is None:
        raise ConfigError("astuner check tokens needs an experiment file or a trace; write: astuner check tokens FILE")
    from astuner_record.token_check.report import check_allowed

    allowed = list(allow or ())
    check_allowed(allowed)
    on_or_off = {None: (), Tools.ON: (True,), Tools.OFF: (False,), Tools.BOTH: (True, False)}[tools]
    with only_data_on_stdout(True):  # agents print what they like
        from astuner import load_config
        from astuner_record.token_check.checks import check_config, check_trace

        plugins = command_line(ctx).plugins
        if target.suffix in (".jsonl", ".json"):
            for name, value in {"overrides": overrides, "scenario": scenarios}.items():
                if value:
                    raise ConfigError(f"{target} is a recording, and {name} is for experiments; leave it out")
            resolved = target.absolute().parent.parent / "resolved.yaml"  # beside episodes/, in a run's folder
            config = load_config(resolved, plugins=plugins) if model is None and resolved.is_file() else None
            report = check_trace(
                target, model=model, config=config, templates=templates or [], tools=on_or_off, plugins=plugins
            )
        else:
            if model is not None:
                raise ConfigError("--model is for traces; for an experiment write astuner.model.path=…")
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
