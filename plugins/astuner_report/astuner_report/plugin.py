"""What this plugin offers, described without importing it."""

from __future__ import annotations

from astuner import Provider, hookimpl


@hookimpl
def register_commands() -> dict[str, Provider]:
    return {
        "report": Provider(
            target="astuner_report.report_command:app",
            summary="write the report of a run again",
        ),
        "diff": Provider(
            target="astuner_report.diff_command:app",
            summary="compare two runs on the same tasks",
        ),
    }
