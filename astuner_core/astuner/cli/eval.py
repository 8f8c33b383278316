"""``astuner eval FILE``: success on held-out tasks, with its uncertainty."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from astuner.cli.common import check_overrides, disabled_plugins, only_data_on_stdout, write_json
from astuner.cli.run import (
    BackboneOption,
    FileArgument,
    JsonOption,
    OverridesArgument,
    RunDirOption,
    WithOption,
    check_services,
    in_run_dir,
)
from astuner.support.collector import collect_rarely_while_loading

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)

CheckpointOption = Annotated[
    str,
    typer.Option(
        metavar="best|latest|base|DIR",
        help="The checkpoint that did best in its validation, the newest, the model before training, or a folder.",
    ),
]


@app.command()
def evaluate(
    ctx: typer.Context,
    file: FileArgument,
    overrides: OverridesArgument = None,
    backbone: BackboneOption = None,
    checkpoint: CheckpointOption = "best",
    run_dir: RunDirOption = None,
    tasks: Annotated[int | None, typer.Option(min=1, metavar="N", help="Only the first N validation tasks.")] = None,
    repeat: Annotated[int | None, typer.Option(min=1, metavar="K", help="Episodes per task.")] = None,
    services: WithOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the success of a checkpoint on the validation tasks."""
    collect_rarely_while_loading()
    from astuner.runs import serving

    given = list(overrides or ())
    check_overrides(given)
    check_services(ctx, services or ())
    given += in_run_dir(run_dir)
    with only_data_on_stdout(as_json):
        result = serving.evaluate(
            file,
            given,
            backbone=backbone,
            checkpoint=checkpoint,
            tasks=tasks,
            repeat=repeat,
            services=tuple(services or ()),
            disabled_plugins=disabled_plugins(ctx),
        )
    if as_json:
        write_json({"checkpoint": checkpoint, **asdict(result)})
    else:
        typer.echo(f"{checkpoint}: success {result}, reward {result.reward:.3f}")
