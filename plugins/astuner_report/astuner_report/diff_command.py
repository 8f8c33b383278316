"""``astuner diff RUN_A RUN_B``: two runs on the same tasks, with paired statistics."""

from __future__ import annotations

import glob
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from astuner.contracts.commands import JsonOption, new_app, only_data_on_stdout, write_json
from astuner.contracts.errors import ConfigError
from astuner.contracts.types import Split

app = new_app()


_WIDEST = 60
"""Characters of a setting or a query that are shown."""


class By(str, Enum):
    """What makes two tasks the same."""

    TASK = "task"
    TEXT = "text"


EXAMPLES = """\
\b
Examples:
  astuner diff launcher_record/grpo launcher_record/gspo
  astuner diff launcher_record/grpo launcher_record/grpo --step-a 0 --step-b 250
  astuner diff 'launcher_record/grpo-seed*' 'launcher_record/gspo-seed*' --json
"""


@app.command(epilog=EXAMPLES)
def diff(
    run_a: Annotated[
        str, typer.Argument(metavar="RUN_A", help="A run folder; several seeds: a pattern in quotes, 'DIR/grpo-seed*'.")
    ],
    run_b: Annotated[str, typer.Argument(metavar="RUN_B", help="The run, or runs, to compare with it.")],
    step_a: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="The validation of A after this step. Default: its newest.")
    ] = None,
    step_b: Annotated[int | None, typer.Option(min=0, metavar="N", help="The same for B.")] = None,
    split: Annotated[Split, typer.Option(help="Compare validation, or what was trained on.")] = Split.VALIDATION,
    by: Annotated[By, typer.Option(help="Tasks are the same by id and text, or by the text alone.")] = By.TASK,
    common: Annotated[
        bool, typer.Option("--common", help="Compare the tasks that are in all runs, though some have others.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the random draws.")] = 0,
    show: Annotated[int, typer.Option(min=0, metavar="N", help="List this many settings and tasks of each kind.")] = 10,
    as_json: JsonOption = False,
) -> None:
    """Compare two runs on the same tasks: settings, success and reward with intervals, tasks won and lost."""
    with only_data_on_stdout(as_json):
        from astuner_record.episode_log.salvage import end_partly
        from astuner_report.compare import compare

        result = compare(
            _runs("RUN_A", run_a),
            _runs("RUN_B", run_b),
            split=split,
            step_a=step_a,
            step_b=step_b,
            by=by.value,
            common=common,
            seed=seed,
        )
    if as_json:
        write_json(result)
    else:
        from astuner_report.rendering import rendered

        typer.echo(rendered("diff.txt", show=show, WIDEST=_WIDEST, **result).rstrip())
    end_partly(result["problems"])


def _runs(name: str, pattern: str) -> list[Path]:
    """The run folders that a person means."""
    if Path(pattern).expanduser().is_dir():
        return [Path(pattern).expanduser()]
    found = [Path(p) for p in sorted(glob.glob(str(Path(pattern).expanduser())))]
    runs = [p for p in found if (p / "resolved.yaml").is_file()]
    if not runs:
        beside = sorted(p.parent for p in Path(pattern).expanduser().parent.glob("*/resolved.yaml"))
        there = f"; there are {', '.join(map(str, beside[:10]))}" if beside else ""
        raise ConfigError(f"{name}: {pattern} is no run folder, and no pattern of any{there}")
    return runs
