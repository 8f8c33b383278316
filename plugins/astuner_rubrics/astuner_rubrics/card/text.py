"""A card to read: as text (which is Markdown), or as one HTML page without scripts.

Both are made of the same rows.  What others wrote (a failure's message) is shown as text only.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

from astuner_rubrics.card.card import Card
from astuner_rubrics.card.measure import Measure

_HEADS = ("", "value", "95 % interval", "of", "wanted", "")
_SAID = {"good": "good", "care": "care", "bad": "bad", "unknown": "too few", "info": ""}
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;width:100%}td,th{padding:.25rem .6rem;border-bottom:1px solid #ccc;text-align:left}"
    ".bad{color:#a00}.care,.unknown{color:#850}.good{color:#060}"
)


def as_markdown(card: Card) -> str:
    """The whole card."""
    lines = [f"# {card.judge}: {card.fitness}", "", _about(card), ""]
    lines += [f"- {reason}" for reason in card.reasons]
    lines += ["", *_table([_HEADS, *(_row(m) for m in card.measures)]), ""]
    for title, entries in _lists(card):
        lines += [f"**{title}**", "", *(f"- {_inline(entry)}" for entry in entries), ""]
    return "\n".join(lines)


def as_html(card: Card) -> str:
    """One page, which loads nothing."""
    e = html.escape
    rows = "".join(
        f'<tr class="{m.grade}">' + "".join(f"<td>{e(cell)}</td>" for cell in _row(m)) + "</tr>" for m in card.measures
    )
    heads = "".join(f"<th>{e(h)}</th>" for h in _HEADS)
    lists = "".join(
        f"<h2>{e(title)}</h2><ul>{''.join(f'<li>{e(entry)}</li>' for entry in entries)}</ul>"
        for title, entries in [("Why", list(card.reasons)), *_lists(card)]
        if entries
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{e(card.judge)}</title><style>{_STYLE}</style>'
        f"<h1>{e(card.judge)}: {e(card.fitness)}</h1><p>{e(_about(card))}</p>"
        f"<table><tr>{heads}</tr>{rows}</table>{lists}</html>\n"
    )


def write(card: Card, path: Path) -> None:
    """Write the card as the file's name says."""
    text = as_html(card) if path.suffix in (".html", ".htm") else as_markdown(card)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", errors="backslashreplace")


def _about(card: Card) -> str:
    return (
        f"{card.examples} {card.mode.value} examples of {card.labels} (sha256 {card.labels_sha256[:12]}), "
        f"{card.date}, seed {card.seed}."
    )


def _lists(card: Card) -> list[tuple[str, list[str]]]:
    found = [
        ("Attacks that succeeded", [f"{name}: {share:.0%}" for name, share in list(card.weaknesses.items())[:20]]),
        ("Why there was no verdict", [f"{count} times: {why}" for why, count in card.failures.items()]),
        ("Notes", list(card.notes)),
    ]
    return [(title, entries) for title, entries in found if entries]


def _row(m: Measure) -> tuple[str, ...]:
    value = (m.note or "none") if m.value is None else _number(m.value)
    interval = f"{_number(m.interval[0])} to {_number(m.interval[1])}" if m.interval else ""
    wanted = str(m.limits) if m.limits else ""
    return (m.name, value, interval, str(m.n), wanted, "" if m.note else _SAID[m.grade])


def _number(x: float) -> str:
    return f"{x:.2f}" if x == 0 or 0.005 <= abs(x) < 100 else f"{x:.2g}" if abs(x) < 100 else f"{x:,.0f}"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [[_inline(cell).replace("|", "\\|") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in cells]
    return [lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]]


def _inline(text: str) -> str:
    """One line, with nothing that Markdown takes for a tag, and no control characters for the terminal."""
    line = " ".join(text.split())
    return "".join(c for c in line if c.isprintable()).replace("<", "&lt;")
