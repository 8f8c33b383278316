"""The report of a run: one page, as ``report.html`` and ``report.md``, and the same facts as data.

::

    origin  command, time, versions and machine, recorded when a run begins
    energy  energy counters of the machine
    files   readers of the files of a run folder; damaged parts are left out and listed
    facts   all facts of the report, gathered from the run folder; ``templates/report.md`` renders them

The page is rendered from the Markdown. It contains no scripts, no external resources, and only HTML that Markdown
generates.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from astuner import RunDir
from astuner_record.certificate import summary_of
from astuner_report.curve import reward_curve_svg
from astuner_report.rendering import MARKS, rendered
from astuner_report.run_report.facts import gather
from astuner_report.run_report.files import is_measured, read_rows

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
"""Content security policy of the page, which forbids scripts, forms, frames and requests."""


def write_report(run_dir: RunDir, ledger: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Write ``report.html``, ``report.md`` and ``reward_curve.svg`` into a run folder; return the facts.

    :param ledger: how the episodes ended, if the run itself calls; None: read it from the folder.
    """
    facts = gather(run_dir, ledger)
    svg = reward_curve_svg(read_rows(run_dir.metrics, [], is_measured))
    text = to_markdown(facts)
    run_dir.write_atomically(run_dir.curve_svg, svg)
    run_dir.write_atomically(run_dir.report_html, to_html(text, f"{facts['name']}: report", svg))
    run_dir.write_atomically(run_dir.report_md, text)
    return facts


def to_markdown(facts: Mapping[str, Any]) -> str:
    """Return the report as Markdown.

    :param facts: of `astuner_report.run_report.facts.gather`.
    """
    marks = {level: Markup(mark) for level, mark in MARKS.items()}
    text = rendered("report.md", MARKS=marks, summary_of=summary_of, **facts)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def to_html(markdown: str, title: str, svg: str = "") -> str:
    """Return the report as an HTML page.

    :param svg: trusted SVG that replaces the picture of the report.
    """
    from markdown_it import MarkdownIt

    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(markdown)
    for level, mark in MARKS.items():
        call = f'<blockquote class="call {level}"><p><span class="mark">{mark}</span>'
        body = body.replace(f"<blockquote>\n<p>{mark}", call)
    body = body.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>")
    body = re.sub(
        r'<p><img src="[\w.]+" alt="(.*?)" /></p>',
        lambda found: f"<figure>{svg}<figcaption>{found[1]}</figcaption></figure>",
        body,
    )
    return rendered("report.html", title=title, body=body, policy=POLICY)


__all__ = ["write_report"]
