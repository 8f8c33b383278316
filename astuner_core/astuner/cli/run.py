"""``astuner run FILE``: one command trains, debugs, or shows the plan."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from astuner.cli.common import check_overrides, disabled_plugins, load_plugins, only_data_on_stdout, write_json
from astuner.support.collector import collect_rarely_while_loading

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="The experiment file.", show_default=False)]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="Override keys, e.g. astuner.rollout.num_repeat=8.", show_default=False
    ),
]
BackboneOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="What runs it, e.g. local; `astuner plugins` lists them.")
]
RunDirOption = Annotated[
    Path | None, typer.Option(metavar="DIR", help="The run's folder. Default: launcher_record/<name of FILE>.")
]
WithOption = Annotated[
    list[str] | None,
    typer.Option("--with", metavar="NAME", help="Start a service, or serve an environment, beside it (repeatable)."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON; everything else goes to stderr.")]


@app.command()
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
    debug_tags: Annotated[
        list[str] | None,
        typer.Option("--db", "--debug-tags", metavar="'TAG|TAG'", help="Stop at bp(\"TAG\") in the agent's code."),
    ] = None,
    debug_listen: Annotated[
        bool, typer.Option("--db-listen", help="Wait there for a debugger, though there is a terminal.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Train, or debug, as an experiment file says."""
    collect_rarely_while_loading()
    from astuner.runs import launch

    given = list(overrides or ())
    check_overrides(given)
    check_services(ctx, services or ())
    given += _shorthands(seed, steps) + in_run_dir(run_dir)
    with only_data_on_stdout(as_json):
        result = launch.run(
            file,
            given,
            backbone=backbone,
            resume="auto" if resume is None else "must" if resume else "never",
            dry_run=dry_run,
            services=tuple(services or ()),
            disabled_plugins=disabled_plugins(ctx),
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


def in_run_dir(run_dir: Path | None) -> list[str]:
    """``--run-dir`` as overrides."""
    if run_dir is None:
        return []
    full = run_dir.expanduser().absolute()
    return [f"astuner.experiment_dir={_quoted(full.parent)}", f"astuner.experiment_name={_quoted(full.name)}"]


def _shorthands(seed: int | None, steps: int | None) -> list[str]:
    """The convenience options as overrides; later ones win, so they win over ``key=value``."""
    overrides = []
    if seed is not None:
        overrides.append(f"astuner.seed={seed}")
    if steps is not None:
        overrides.append(f"astuner.trainer_common.total_steps={steps}")
    return overrides


def _quoted(text: object) -> str:
    """As a YAML string, whatever is in it: a folder may be called 007."""
    return json.dumps(str(text), ensure_ascii=False)


def check_services(ctx: typer.Context, names: Sequence[str]) -> None:
    """Refuse an unknown service before anything is loaded; the message says what provides it."""
    if not names:
        return
    from astuner.runs import companions

    companions.check(load_plugins(ctx), names)
