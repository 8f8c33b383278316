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
    all_overrides,
    command_line,
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

    given, line = all_overrides(overrides, run_dir), command_line(ctx)
    if seed is not None:
        given.append(f"astuner.seed={seed}")  # later ones win
    if steps is not None:
        given.append(f"astuner.trainer_common.total_steps={steps}")
    line.check_services(services or ())
    with only_data_on_stdout(as_json):
        result = launch.run(
            file,
            given,
            backbone=backbone,
            resume="auto" if resume is None else "must" if resume else "never",
            dry_run=dry_run,
            services=tuple(services or ()),
            disabled_plugins=line.disabled_plugins,
            debug_tags=tuple(debug_tags or ()),
            debug_listen=debug_listen,
        )
    if as_json:
        told: dict[str, Any] = {"run_dir": str(result.run_dir), "metrics": dict(result.metrics)}
        if result.verdict:
            told |= {"updated": dict(result.updated), "verdict": dict(result.verdict)}
        if result.best_checkpoint:
            told["best_checkpoint"] = str(result.best_checkpoint)
        if result.plan:
            told["plan"] = dict(result.plan.lines)
        write_json(told)
    else:
        typer.echo(result.summary())
