"""``astuner eval FILE``: measure the success on the validation tasks."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from astuner.contracts.commands import (
    BackboneOption,
    CheckpointOption,
    FileArgument,
    JsonOption,
    OverridesArgument,
    RunDirOption,
    WithOption,
    asked,
    only_data_on_stdout,
    write_json,
)


def measure(
    ctx: typer.Context,
    file: FileArgument,
    overrides: OverridesArgument = None,
    backbone: BackboneOption = None,
    checkpoint: CheckpointOption = "best",
    run_dir: RunDirOption = None,
    tasks: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Use only the first N validation tasks.")
    ] = None,
    repeat: Annotated[int | None, typer.Option(min=1, metavar="K", help="Run K episodes per task.")] = None,
    services: WithOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the success of a checkpoint on the validation tasks."""
    from astuner_models.serving import evaluate

    given = asked(ctx, file, overrides, run_dir, services, backbone=backbone, checkpoint=checkpoint)
    with only_data_on_stdout(as_json):
        result = evaluate(**given, tasks=tasks, repeat=repeat)
    if as_json:
        write_json({"checkpoint": checkpoint, **asdict(result), "hint": result.hint})
    else:
        hint = f"; {result.hint}" if result.hint else ""
        typer.echo(f"{checkpoint}: success {result}, reward {result.reward:.3f}{hint}")
