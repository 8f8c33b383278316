"""``astuner report RUN``: write the report of a run again from the files in its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from astuner.contracts.commands import JsonOption, only_data_on_stdout, write_json
from astuner.contracts.errors import ConfigError, DataError


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.", show_default=False)],
    as_json: JsonOption = False,
) -> None:
    """Write report.html, report.md and the reward curve of a run, finished or not.

    Damaged files are left out and listed; the exit code is then 3.
    """
    from astuner import RunDir
    from astuner_record.episode_log.salvage import end_partly
    from astuner_report.curve import draw_reward_curve
    from astuner_report.run_report import write_report
    from astuner_report.run_report.files import NONSENSE, is_measured, read_rows
    from astuner_report.run_report.summary import summary_lines

    run_dir = RunDir(run)
    if not run_dir.resolved.is_file():
        raise ConfigError(
            f"{run_dir.path} is not a run folder, because resolved.yaml is missing. Pass a folder below "
            "launcher_record/, or the one passed to --run-dir"
        )
    with only_data_on_stdout(as_json):
        try:
            facts = write_report(run_dir)
            draw_reward_curve(read_rows(run_dir.metrics, [], is_measured), run_dir.curve)
        except (OSError, *NONSENSE) as e:
            said = f"Could not write the report of {run_dir.path} ({type(e).__name__}: {e})"
            raise DataError(f"{said}. Restore the files that the run wrote, resolved.yaml first") from e
    if as_json:
        write_json(facts)
    else:
        lines = summary_lines(facts, run_dir) | ({"Next": facts["next"]["command"]} if facts["next"] else {})
        texts = (text.replace("\n", "\n  ") for text in lines.values())
        details = (f"{label}\n  {text}" for label, text in zip(lines, texts, strict=True))
        typer.echo("\n".join([str(run_dir.report_html), str(run_dir.report_md), *details]))
    end_partly(facts["damage"])
