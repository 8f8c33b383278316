"""Keys of the report below ``astuner``."""

from __future__ import annotations

from astuner.contracts.section import Section


class ReportSection(Section):
    """Settings of the report."""

    slices: list[str] | None = None
    """Metadata fields of tasks by which metrics and report show success, as dotted paths. Default: up to four fields
    with few values. `[]`: none."""


class ReportKeys(Section):
    """Keys that the report adds to ``astuner``."""

    report: ReportSection = ReportSection()
    """Settings of the report."""
