"""A document as one HTML file: no scripts, nothing from elsewhere, and nothing in it can become either.

Every text goes through `escape`; the page's policy forbids scripts, forms, frames and requests besides.
"""

from __future__ import annotations

import html

from astuner_report.run_report.document import Block, Callout, Code, Document, Figure, Table, Text, shown

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
_MARKS = {"good": "✓", "warning": "!", "error": "✗"}
_STYLE = """
:root{color-scheme:light dark;--text:#1d2129;--soft:#5b6472;--line:#d9dde3;--back:#fff;--card:#f6f7f9;
--good:#19703c;--warning:#8a5a00;--error:#b3261e}
@media (prefers-color-scheme:dark){:root{--text:#e4e7eb;--soft:#9aa3af;--line:#343a43;--back:#14171b;--card:#1c2026;
--good:#6fd08c;--warning:#e6b450;--error:#ff8a80}}
*{box-sizing:border-box}body{margin:0 auto;max-width:60rem;padding:2rem 1.2rem;color:var(--text);
background:var(--back);font:15px/1.5 system-ui,sans-serif}
h1{font-size:1.6rem;margin:0;overflow-wrap:anywhere}h2{font-size:1.1rem;margin:2rem 0 .6rem;
border-bottom:1px solid var(--line);padding-bottom:.2rem}
.sub{color:var(--soft);margin:.2rem 0 0}p{margin:.6rem 0;overflow-wrap:anywhere}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%;margin:.6rem 0}
th,td{text-align:left;vertical-align:top;padding:.3rem .6rem;border-bottom:1px solid var(--line);
overflow-wrap:anywhere;min-width:4rem}th{color:var(--soft);font-weight:600}.n{text-align:right;
font-variant-numeric:tabular-nums}td:first-child{min-width:9rem}
pre{background:var(--card);border:1px solid var(--line);border-radius:6px;padding:.7rem;white-space:pre-wrap;
overflow-wrap:anywhere}.call{border-left:4px solid;border-radius:4px;background:var(--card);padding:.5rem .8rem}
.good{border-color:var(--good)}.warning{border-color:var(--warning)}.error{border-color:var(--error)}
.mark{font-weight:700;margin-right:.4rem}.good .mark{color:var(--good)}.warning .mark{color:var(--warning)}
.error .mark{color:var(--error)}figure{margin:.6rem 0}figcaption{color:var(--soft)}svg{width:100%;height:auto}
@media print{:root{--text:#000;--soft:#444;--line:#bbb;--back:#fff;--card:#fff}body{max-width:none;padding:0;
font-size:11px}h2,figure,tr,.call{break-inside:avoid}h2{break-after:avoid}}
""".replace("\n", "")


def escape(text: str) -> str:
    """``text`` as text, also within an attribute in quotes."""
    return html.escape(shown(text))


def to_html(document: Document) -> str:
    title = escape(document.title)
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">'
        '<meta name="viewport" content="width=device-width"><meta name="referrer" content="no-referrer">'
        f"<title>{title}</title><style>{_STYLE}</style></head><body><main>"
        f'<h1>{title}</h1><p class="sub">{escape(document.subtitle)}</p>'
    ]
    for section in document.sections:
        inner = "".join(_block(block) for block in section.blocks)
        parts.append(f"<section><h2>{escape(section.title)}</h2>{inner}</section>\n")
    return "".join([*parts, "</main></body></html>\n"])


def _block(block: Block) -> str:
    match block:
        case Text(text):
            return f"<p>{escape(text)}</p>"
        case Callout(level, text):
            return f'<p class="call {level}"><span class="mark">{_MARKS[level]}</span>{escape(text)}</p>'
        case Code(text):
            return f"<pre>{escape(text)}</pre>"
        case Figure(svg, _, caption):
            return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"
        case Table(head, rows, numbers):
            return _table(head, rows, numbers)


def _table(head: tuple[str, ...], rows: tuple[tuple[str, ...], ...], numbers: frozenset[int]) -> str:
    def line(cells: tuple[str, ...], tag: str) -> str:
        classes = [' class="n"' if column in numbers else "" for column in range(len(cells))]
        inner = (f"<{tag}{kind}>{escape(cell)}</{tag}>" for cell, kind in zip(cells, classes, strict=True))
        return f"<tr>{''.join(inner)}</tr>"

    top = f"<thead>{line(head, 'th')}</thead>" if any(head) else ""
    return f'<div class="wide"><table>{top}<tbody>{"".join(line(row, "td") for row in rows)}</tbody></table></div>'
