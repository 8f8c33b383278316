"""What a document is once it was read: one text, and where in it each page begins.

Invariant: every position in ASTuner's records about a document is a character of `Document.text`, so that
``text[start:end]`` is what a span means, whatever format the file has.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

from astuner.contracts.errors import DataError

KINDS = {
    ".pdf": "pdf",
    ".docx": "docx",
    ".html": "html",
    ".htm": "html",
    ".xhtml": "html",
    ".md": "markdown",
    ".markdown": "markdown",
    ".txt": "text",
    ".text": "text",
    ".rst": "text",
}
"""Suffix -> what the file is."""
READER_VERSION = 1
"""Raised whenever the same file would give another text."""


class BadDocument(DataError):
    """A document cannot be read; the message has the file, the fault and what to do."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one document may be, and what reading it may take."""

    file_mb: float = 100.0
    pages: int = 5000
    characters: int = 10_000_000
    """Of extracted text."""
    seconds: float = 120.0
    """Of processor time."""
    memory_mb: int = 2048


@dataclass(frozen=True, kw_only=True)
class Document:
    """One document as text."""

    path: str
    """As the person wrote it, or as it was found below what they wrote."""
    sha256: str
    """Of the file's bytes."""
    kind: str
    """A value of `KINDS`."""
    text: str
    pages: tuple[int, ...] = ()
    """Where each page begins in `text`; empty for a format without pages."""
    notes: tuple[str, ...] = field(default=())
    """What could not be read in it, e.g. pages that are pictures."""

    def page_of(self, position: int) -> int | None:
        """The page, counted from 1, that a character is on; None for a format without pages."""
        return bisect.bisect_right(self.pages, position) if self.pages else None


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A passage of a document: ``document.text[start:end]``."""

    document: Document
    start: int
    end: int

    @property
    def text(self) -> str:
        return self.document.text[self.start : self.end]

    @property
    def id(self) -> str:
        """The same for the same passage of the same file, wherever it lies."""
        return f"{self.document.sha256[:16]}:{self.start}-{self.end}"
