"""``astuner diff RUN_A RUN_B``: compare two runs on the same tasks with paired statistics."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from astuner.contracts.commands import (
    JsonOption,
    OverridesArgument,
    WithOption,
    all_overrides,
    command_line,
    new_app,
    only_data_on_stdout,
    write_json,
)
from astuner.contracts.errors import ConfigError
from astuner.contracts.types import Split

if TYPE_CHECKING:
    from astuner_report.compare.anew import Anew

app = new_app()


_WIDEST = 60
"""Maximum number of characters shown of a setting or a query."""


class By(str, Enum):
    """The criterion by which two tasks are the same."""

    TASK = "task"
    TEXT = "text"


EXAMPLES = """\
\b
Examples:
  astuner diff launcher_record/grpo launcher_record/gspo
  astuner diff launcher_record/grpo launcher_record/grpo --step-a 0 --step-b 250
  astuner diff 'launcher_record/grpo-seed*' 'launcher_record/gspo-seed*' --json
  astuner diff launcher_record/grpo launcher_record/gspo --judge 'my_judge.py->MyJudge'
"""


@app.command(epilog=EXAMPLES)
def diff(
    ctx: typer.Context,
    run_a: Annotated[
        str,
        typer.Argument(metavar="RUN_A", help="Run folder, or a quoted pattern for several seeds: 'DIR/grpo-seed*'."),
    ],
    run_b: Annotated[str, typer.Argument(metavar="RUN_B", help="Run folder or pattern to compare with RUN_A.")],
    overrides: OverridesArgument = None,
    step_a: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Use the validation of A after this step. Default: the newest."),
    ] = None,
    step_b: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Use the validation of B after this step. Default: the newest."),
    ] = None,
    split: Annotated[Split, typer.Option(help="Compare validation or training episodes.")] = Split.VALIDATION,
    by: Annotated[By, typer.Option(help="Match tasks by ID and text, or by text only.")] = By.TASK,
    common: Annotated[bool, typer.Option("--common", help="Compare only the tasks that all runs share.")] = False,
    judge: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE.py->CLASS",
            help="Judge both sides again with the settings of the first RUN_A and KEY=VALUE. Writes nothing.",
            show_default=False,
        ),
    ] = None,
    services: WithOption = None,
    parallel: Annotated[
        int, typer.Option(min=1, metavar="N", help="Number of episodes that --judge scores concurrently.")
    ] = 8,
    seed: Annotated[int, typer.Option(help="Seed of the random draws.")] = 0,
    show: Annotated[
        int, typer.Option(min=0, metavar="N", help="Number of settings and tasks of each kind to list.")
    ] = 10,
    as_json: JsonOption = False,
) -> None:
    """Compare two runs on the same tasks: settings, success and reward with intervals, tasks won and lost."""
    given = all_overrides(overrides)
    if judge is None and (given or services):
        raise ConfigError("KEY=VALUE and --with require --judge. Add --judge NAME, or remove them")
    command_line(ctx).check_services(services or ())
    runs = _runs("RUN_A", run_a), _runs("RUN_B", run_b)
    with only_data_on_stdout(as_json), _judging(ctx, runs[0][0], judge, given, services or (), parallel) as anew:
        from astuner_record.episode_log.salvage import end_partly
        from astuner_report.compare import compare

        result = compare(
            *runs,
            split=split,
            step_a=step_a,
            step_b=step_b,
            by=by.value,
            common=common,
            seed=seed,
            anew=anew,
        )
    if as_json:
        write_json(result)
    else:
        from astuner_report.rendering import rendered

        typer.echo(rendered("diff.txt", show=show, WIDEST=_WIDEST, **result).rstrip())
    end_partly(result["problems"])


@contextmanager
def _judging(
    ctx: typer.Context, run: Path, judge: str | None, overrides: Sequence[str], services: Sequence[str], parallel: int
) -> Iterator[Anew | None]:
    """Yield the judge with the settings of a run; None if ``judge`` is None."""
    if judge is None:
        yield None
        return
    from astuner import run_services
    from astuner_record.replay import RecordedRun
    from astuner_record.replay_command import found_here
    from astuner_report.compare.anew import judging

    with RecordedRun(run) as recorded:
        chosen = [f"astuner.task_judge.judge={found_here(judge)}", *overrides]
        config = recorded.config(chosen, backbone="debug", plugins=command_line(ctx).plugins)
    say = partial(typer.echo, err=True)
    with run_services(config, tuple(services)), judging(config, parallel=parallel, say=say) as anew:
        yield anew


def _runs(name: str, pattern: str) -> list[Path]:
    """Return the run folders that a path or a pattern matches."""
    if Path(pattern).expanduser().is_dir():
        return [Path(pattern).expanduser()]
    found = [Path(p) for p in sorted(glob.glob(str(Path(pattern).expanduser())))]
    runs = [p for p in found if (p / "resolved.yaml").is_file()]
    if not runs:
        beside = sorted(p.parent for p in Path(pattern).expanduser().parent.glob("*/resolved.yaml"))
        there = f". Available: {', '.join(map(str, beside[:10]))}" if beside else ""
        raise ConfigError(f"{name}: {pattern} is not a run folder and matches none{there}")
    return runs
