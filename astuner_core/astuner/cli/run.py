"""``astuner run FILE``: train, debug, or show the plan."""

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
        typer.Option("--resume/--no-resume", help="Require resuming, or start over. Default: resume if possible."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and exit.")] = False,
    probe: Annotated[
        bool,
        typer.Option("--probe", help="Train up to three steps in a temporary folder, then print the plan with times."),
    ] = False,
    services: WithOption = None,
    seed: Annotated[int | None, typer.Option(help="Set astuner.seed.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Set astuner.trainer_common.total_steps.")] = None,
    run_dir: RunDirOption = None,
    debug_tags: DebugTagsOption = None,
    debug_listen: Annotated[
        bool, typer.Option("--db-listen", help="At a breakpoint, wait for a debugger instead of using the terminal.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Train or debug the agent of an experiment file."""
    from astuner.builtin.console import JSON_EVENTS
    from astuner.runs import launch

    short = {"seed": seed, "trainer_common.total_steps": steps}
    given = [f"astuner.{key}={number}" for key, number in short.items() if number is not None]  # the last override wins
    JSON_EVENTS.set(as_json)
    with only_data_on_stdout(as_json):
        common = asked(ctx, file, [*(overrides or ()), *given], run_dir, services, backbone=backbone)
        result = (
            launch.probe(**common)
            if probe
            else launch.run(
                **common,
                resume="auto" if resume is None else "must" if resume else "never",
                dry_run=dry_run,
                debug_tags=tuple(debug_tags or ()),
                debug_listen=debug_listen,
            )
        )
    if as_json:
        told: dict[str, Any] = {"run_dir": str(result.run_dir), "metrics": dict(result.metrics)}
        if result.verdict:
            told |= {"updated": dict(result.updated), "verdict": dict(result.verdict)}
            told |= {"next": dict(result.next), "informative_episodes": [*result.informative_episodes]}
        if result.best_checkpoint:
            told["best_checkpoint"] = str(result.best_checkpoint)
            told["best_validation"] = dict(result.best_validation)
        if result.plan:
            told["plan"] = dict(result.plan.lines)
        if result.estimate:
            told["estimate"] = dict(result.estimate)
        write_json(told)
    else:
        typer.echo(result.summary())
