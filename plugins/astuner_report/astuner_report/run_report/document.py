"""A report before it has a form: sections of paragraphs, tables, commands and one figure; and its two forms.

Texts are plain, since they come from models, agents and files: HTML (the template ``report.html``: no scripts,
nothing from elsewhere, and nothing in it can become either) and Markdown escape all of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from astuner_report.rendering import rendered, shown

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
"""Of the page, which forbids scripts, forms, frames and requests besides."""
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~!$&])")


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    kind: ClassVar[str] = "text"
    text: str


@dataclass(frozen=True)
class Table:
    """Rows of cells below a head; numbers stand right."""

    kind: ClassVar[str] = "table"
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: frozenset[int] = frozenset()
    """Columns that hold numbers."""


@dataclass(frozen=True)
class Code:
    """What to type."""

    kind: ClassVar[str] = "code"
    text: str


@dataclass(frozen=True)
class Callout:
    """What a person must not miss."""

    kind: ClassVar[str] = "callout"
    level: str
    """``good``, ``warning`` or ``error``."""
    text: str

    @property
    def mark(self) -> str:
        return {"good": "✓", "warning": "!", "error": "✗"}[self.level]


@dataclass(frozen=True)
class Figure:
    """A picture: SVG of our own making, and the name of its file."""

    kind: ClassVar[str] = "figure"
    svg: str
    file: str
    caption: str


Block: TypeAlias = Text | Table | Code | Callout | Figure


@dataclass(frozen=True)
class Section:
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Document:
    title: str
    subtitle: str
    sections: tuple[Section, ...]


def facts_table(facts: Mapping[str, object]) -> Table:
    """Two columns, of what is known."""
    known = {name: value for name, value in facts.items() if value not in (None, "", {}, [])}
    return Table(("", ""), tuple((name, f"{value}") for name, value in known.items()))


def to_html(document: Document) -> str:
    return rendered("report.html", document=document, policy=POLICY)


def to_markdown(document: Document) -> str:
    parts = [f"# {escaped(document.title)}", escaped(document.subtitle)]
    for section in document.sections:
        parts.append(f"## {escaped(section.title)}")
        parts += [_markdown(block) for block in section.blocks]
    return "\n\n".join(parts) + "\n"


def escaped(text: str) -> str:
    """One line in which nothing is markup, not even HTML, a link, or the beginning of a list."""
    line = _SPECIAL.sub(r"\\\1", " ".join(shown(text).split()))
    line = line.replace("://", "\\://").replace("www.", "www\\.")  # which some would make links of
    return re.sub(r"^(\d+)([.)])(?= |$)", r"\1\\\2", re.sub(r"^([-+=])(?= |$)", r"\\\1", line))


def _markdown(block: Block) -> str:
    match block:
        case Text(text):
            return escaped(text)
        case Callout(_, text):
            return f"> {block.mark} {escaped(text)}"
        case Code(text):
            line = " ".join(shown(text).splitlines())
            fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", line)), default=0))
            return f"{fence}bash\n{line}\n{fence}"
        case Figure(_, file, caption):
            return f"![{escaped(caption)}]({file})"
        case Table(head, rows, numbers):
            rule = ["---:" if column in numbers else "---" for column in range(len(head))]
            lines = [head, *rows]
            cells = [[escaped(cell) for cell in line] for line in lines]
            cells.insert(1, rule)
            return "\n".join(f"| {' | '.join(line)} |" for line in cells)
