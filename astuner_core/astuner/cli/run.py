"""``astuner run FILE``: trains, debugs, or shows the plan."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from astuner.contracts.commands import (
    BackboneOption,
    DebugTagsOption,
    FileArgument,
    JsonOption,
    OverridesArgument,
    RunDirOption,
    WithOption,
    asked,
    only_data_on_stdout,
    write_json,
)


def run(
    ctx: typer.Context,
    file: FileArgument,
    overrides: OverridesArgument = None,
    backbone: BackboneOption = None,
    resume: Annotated[
        bool | None,
        typer.Option(
            "--resume/--no-resume", help="Insist on going on, or on starting over. Default: go on if possible."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would happen, and stop.")] = False,
    services: WithOption = None,
    seed: Annotated[int | None, typer.Option(help="Short for astuner.seed=N.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Short for astuner.trainer_common.total_steps=N.")] = None,
    run_dir: RunDirOption = None,
    debug_tags: DebugTagsOption = None,
    debug_listen: Annotated[
        bool, typer.Option("--db-listen", help="Wait there for a debugger, though there is a terminal.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Train, or debug, as an experiment file says."""
    from astuner.runs import launch

    short = {"seed": seed, "trainer_common.total_steps": steps}
    given = [f"astuner.{key}={number}" for key, number in short.items() if number is not None]  # later ones win
    with only_data_on_stdout(as_json):
        result = launch.run(
            **asked(ctx, file, [*(overrides or ()), *given], run_dir, services, backbone=backbone),
            resume="auto" if resume is None else "must" if resume else "never",
            dry_run=dry_run,
            debug_tags=tuple(debug_tags or ()),
            debug_listen=debug_listen,
        )
    if as_json:
        told: dict[str, Any] = {"run_dir": str(result.run_dir), "metrics": dict(result.metrics)}
        if result.verdict:
            told |= {"updated": dict(result.updated), "verdict": dict(result.verdict)}
        if result.best_checkpoint:
            told["best_checkpoint"] = str(result.best_checkpoint)
            told["best_validation"] = dict(result.best_validation)
        if result.plan:
            told["plan"] = dict(result.plan.lines)
        write_json(told)
    else:
        typer.echo(result.summary())
