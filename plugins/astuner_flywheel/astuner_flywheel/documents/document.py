"""Select documents, represent their texts, and split them into passages.

Skipped files (another suffix in a folder, a link that leads out of it) are listed with a reason. Invariants: the same
files give the same list in the same order; every recorded position is a character of `Document.text`, so
``text[start:end]`` is the content of a span for every file format; a passage is exactly the text between its positions.
"""

from __future__ import annotations

import bisect
import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from astuner.contracts.errors import ConfigError, DataError

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
"""Map suffixes to the kind of file."""
READER_VERSION = 1
"""Version of the extraction. Increase it if the same file would give a different text."""


class BadDocument(DataError):
    """A document cannot be read. The message has the file, the reason and a solution."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a document and of reading it."""

    file_mb: float = 100.0
    pages: int = 5000
    characters: int = 10_000_000
    """Maximum extracted text."""
    seconds: float = 120.0
    """Maximum processor time."""
    memory_mb: int = 2048


@dataclass(frozen=True, kw_only=True)
class Document:
    """A document as text."""

    path: str
    """Path as the user wrote it, or as found below it."""
    sha256: str
    """Hash of the file's bytes."""
    kind: str
    """One of the values of `KINDS`."""
    text: str
    pages: tuple[int, ...] = ()
    """Start of each page in `text`. Empty for formats without pages."""
    notes: tuple[str, ...] = field(default=())
    """Parts that could not be read, e.g. pages that are images."""

    def page_of(self, position: int) -> int | None:
        """Return the page of a character, counted from 1, or None for formats without pages."""
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
        """Return an ID that is the same for the same passage of the same file, wherever it is stored."""
        return f"{self.document.sha256[:16]}:{self.start}-{self.end}"


MARK = "generation.json"
"""File that marks a folder of generated tasks."""


def find(paths: Sequence[str], base_dir: Path) -> tuple[list[Path], dict[str, str]]:
    """Return the files that ``paths`` select, each once, in the order of ``paths`` and by name below a folder.

    Hidden files and folders below a folder are skipped. A file that is named itself is always selected, even with
    another suffix: reading it reports the problem.

    :param base_dir: Base of relative paths.
    :returns: The files, and the reasons for skipped files by path.
    :raises ConfigError: A path or pattern matches no file.
    """
    files: dict[Path, None] = {}
    ignored: dict[str, str] = {}
    problems = []
    for written in paths:
        path = base_dir / Path(written).expanduser()
        if path.is_dir():
            found = list(_below(path, ignored))
            if not found:
                problems.append(f"documents: the folder {path} has no file with the suffix {', '.join(sorted(KINDS))}")
        elif os.path.lexists(path):
            found = [path]
        elif glob.has_magic(str(path)):
            found = list(_matching(path, ignored))
            if not found:
                problems.append(f"documents: no readable file matches {written!r} (searched {path})")
        else:
            problems.append(
                f"documents: {written!r} does not exist (searched {path}); relative paths start at the experiment file"
            )
            continue
        files.update(dict.fromkeys(found))
    if problems:
        raise ConfigError(problems)
    return list(files), ignored


def _below(folder: Path, ignored: dict[str, str]) -> Iterator[Path]:
    inside = folder.resolve()
    for place, folders, names in os.walk(folder):  # does not follow links to folders
        for name in [n for n in folders if os.path.islink(os.path.join(place, n))]:
            ignored[os.path.join(place, name)] = "a link to a folder; add the folder itself to read it"
        for name in [n for n in folders if (Path(place) / n / MARK).is_file()]:  # contains copies of documents
            ignored[os.path.join(place, name)] = "a folder of generated tasks"
            folders.remove(name)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith(".") and _wanted(path := Path(place) / name, inside, ignored):
                yield path


def _matching(pattern: Path, ignored: dict[str, str]) -> Iterator[Path]:
    fixed = next(parent for parent in pattern.parents if not glob.has_magic(str(parent)))
    inside = fixed.resolve()
    for name in sorted(glob.glob(str(pattern), recursive=True)):
        path = Path(name)
        if not path.is_dir() and _wanted(path, inside, ignored):
            yield path


def _wanted(path: Path, inside: Path, ignored: dict[str, str]) -> bool:
    if path.suffix.lower() not in KINDS:
        ignored[str(path)] = f"the suffix {path.suffix!r} is not supported"
        return False
    if not path.resolve().is_relative_to(inside):
        ignored[str(path)] = "a link that leads out of the folder; add the file itself to read it"
        return False
    return True


def chunk(document: Document, characters: int, *, least: int = 80) -> list[Chunk]:
    """Return the passages of a document.

    :param characters: Maximum length of a passage.
    :param least: Minimum length. Shorter passages, such as page numbers, are dropped unless there are no others.
    """
    from semantic_text_splitter import MarkdownSplitter, TextSplitter

    splitter = (MarkdownSplitter if document.kind == "markdown" else TextSplitter)(characters)
    found = [
        Chunk(document=document, start=start, end=start + len(text))
        for start, text in splitter.chunk_indices(document.text)
        if text.strip()
    ]
    long = [passage for passage in found if passage.end - passage.start >= least]
    return long or found
