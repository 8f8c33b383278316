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


@hookimpl
def register_subscribers() -> dict[str, Provider]:
    return {
        "sentinel": Provider(
            target="astuner_report.subscriber:Watch",
            summary="raises an alarm when a run stops learning, or learns nonsense",
        ),
        "report": Provider(
            target="astuner_report.subscriber:Report",
            summary="where a run comes from, the energy it takes, and its report",
        ),
    }


@hookimpl
def register_config_keys() -> dict[str, Provider]:
    return {
        "trainer_common.sentinel": Provider(
            target="astuner_report.sentinel.settings:SentinelKeys",
            summary="what watches a run",
        )
    }
