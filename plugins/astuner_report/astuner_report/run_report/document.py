"""A report before it has a form: sections of paragraphs, tables, commands and one figure.

Texts are plain: whoever renders a document escapes all of them, since they come from models, agents and files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Table:
    """Rows of cells below a head; numbers stand right."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: frozenset[int] = frozenset()
    """Columns that hold numbers."""


@dataclass(frozen=True)
class Code:
    """What to type."""

    text: str


@dataclass(frozen=True)
class Callout:
    """What a person must not miss."""

    level: str
    """``good``, ``warning`` or ``error``."""
    text: str


@dataclass(frozen=True)
class Figure:
    """A picture: SVG of our own making, and the name of its file."""

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


def shown(text: str) -> str:
    """``text`` without what nobody can see: control characters, and those that turn the direction of writing."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def facts_table(facts: Mapping[str, object]) -> Table:
    """Two columns, of what is known."""
    known = {name: value for name, value in facts.items() if value not in (None, "", {}, [])}
    return Table(("", ""), tuple((name, f"{value}") for name, value in known.items()))

