"""The report of a run: one page for whoever was not there, as ``report.html`` and ``report.md``, and as data.

::

    origin    what was typed, when, with which versions, on which machine: written down when a run begins
    energy    the machine's own counters
    facts     all that is known, from the files of the run folder
    sections  the facts in words, as a `document`, which has two forms: HTML and Markdown
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from astuner import RunDir
from astuner_report.curve import reward_curve_svg
from astuner_report.run_report.document import to_html, to_markdown
from astuner_report.run_report.facts import gather
from astuner_report.run_report.sections import make_document


def write_report(run_dir: RunDir, ledger: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Write ``report.html``, ``report.md`` and ``reward_curve.svg`` into a run folder; the facts that they tell.

    :param ledger: how the episodes ended, where the run itself asks; None: as the folder says.
    """
    facts = gather(run_dir, ledger)
    svg = reward_curve_svg(run_dir.read_metrics())
    document = make_document(facts, svg)
    run_dir.write_atomically(run_dir.curve_svg, svg)
    run_dir.write_atomically(run_dir.report_html, to_html(document))
    run_dir.write_atomically(run_dir.report_md, to_markdown(document))
    return facts


__all__ = ["write_report"]
