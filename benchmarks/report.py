"""Report of a benchmark: tables with a few sentences, as Markdown that is also readable in a terminal."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.machine import commit, machine_line


@dataclass
class Report:
    """Sections of a page; `markdown` adds where and when it was measured."""

    title: str
    intro: str
    """Description of the comparison."""
    parts: list[str] = field(default_factory=list)
    pictures: dict[str, Callable[[Path], object]] = field(default_factory=dict)
    """File name -> function that draws the picture when the report is written."""
    failed: bool = False
    """True if a result is worse than the recorded one."""

    def text(self, text: str) -> None:
        self.parts.append(text)

    def heading(self, text: str) -> None:
        self.parts.append(f"## {text}")

    def table(self, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Add a table; the first column is left-aligned, the others right-aligned."""
        cells = [list(header), *([str(cell) for cell in row] for row in rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
        lines = [
            "| "
            + " | ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
            + " |"
            for row in cells
        ]
        rule = "|" + "|".join("-" * (w + 1) + ":" if i else "-" * (w + 2) for i, w in enumerate(widths)) + "|"
        self.parts.append("\n".join([lines[0], rule, *lines[1:]]))

    def picture(self, name: str, draw: Callable[[Path], None], caption: str) -> None:
        """Add a picture next to the page."""
        self.pictures[name] = draw
        self.parts.append(f"![{caption}]({name})")

    def markdown(self, command: str, seconds: float) -> str:
        """Return the page as Markdown.

        :param command: Command that produced the report.
        :param seconds: Duration of the command.
        """
        stamp = (
            f"{datetime.date.today().isoformat()}, commit {commit()}, `{command}` ({seconds:.0f} s). {machine_line()}"
        )
        return "\n\n".join([f"# {self.title}", self.intro, stamp, *self.parts]) + "\n"


def goal(ratio: float, least: float) -> str:
    """Return a ratio and whether it reaches its goal."""
    return f"{ratio:.2f}x (goal ≥ {least:g}x: {'reached' if ratio >= least else 'MISSED'})"


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def us(seconds: float) -> str:
    return f"{seconds * 1e6:.0f}"
