"""``astuner report RUN``: write a run's report again, from the files in its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from astuner.contracts.commands import JsonOption, only_data_on_stdout, write_json
from astuner.contracts.errors import ConfigError


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.", show_default=False)],
    as_json: JsonOption = False,
) -> None:
    """Write report.html, report.md and the curve of a run, also of one that has not ended."""
    from astuner import RunDir
    from astuner_report.curve import draw_reward_curve
    from astuner_report.run_report import write_report

    run_dir = RunDir(run)
    if not run_dir.resolved.is_file():
        raise ConfigError(
            f"{run_dir.path} is not the folder of a run: it has no resolved.yaml; they are below launcher_record/, or "
            "where --run-dir said"
        )
    with only_data_on_stdout(as_json):
        facts = write_report(run_dir)
        draw_reward_curve(run_dir.read_metrics(), run_dir.curve)
    if as_json:
        write_json(facts)
    else:
        typer.echo(f"{run_dir.report_html}\n{run_dir.report_md}")
