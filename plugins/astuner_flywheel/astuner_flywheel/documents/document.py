"""Documents: which files a person means, what each is once it was read, and the passages that it is cut into.

Nothing is passed over in silence: what is not read (another suffix in a folder, a link that leads out of it) is named
beside the files.  Invariants: the same files on disk give the same list, in the same order; every position in
ASTuner's records about a document is a character of `Document.text`, so that ``text[start:end]`` is what a span means,
whatever format the file has, and a passage is the text between its two positions, letter by letter.
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


MARK = "generation.json"
"""The file by which a folder of generated tasks is known."""


def find(paths: Sequence[str], base_dir: Path) -> tuple[list[Path], dict[str, str]]:
    """The files that ``paths`` mean, each once, in the order of ``paths`` and below a folder by name.

    Hidden files and folders are passed over below a folder. A file that is named itself is always in the list, also
    one of another suffix: reading it says what is wrong.

    :param base_dir: what relative paths start from.
    :returns: the files, and path -> why it is not read of those that were met and left out.
    :raises ConfigError: a path or pattern means no file.
    """
    files: dict[Path, None] = {}
    ignored: dict[str, str] = {}
    problems = []
    for written in paths:
        path = base_dir / Path(written).expanduser()
        if path.is_dir():
            found = list(_below(path, ignored))
            if not found:
                problems.append(f"documents: the folder {path} has no file with a suffix of {', '.join(sorted(KINDS))}")
        elif os.path.lexists(path):
            found = [path]
        elif glob.has_magic(str(path)):
            found = list(_matching(path, ignored))
            if not found:
                problems.append(f"documents: nothing that can be read matches {written!r} (looked for {path})")
        else:
            problems.append(
                f"documents: there is no {written!r} (looked for {path}); relative paths start at the experiment file"
            )
            continue
        files.update(dict.fromkeys(found))
    if problems:
        raise ConfigError(problems)
    return list(files), ignored


def _below(folder: Path, ignored: dict[str, str]) -> Iterator[Path]:
    inside = folder.resolve()
    for place, folders, names in os.walk(folder):  # links to folders are not followed
        for name in [n for n in folders if os.path.islink(os.path.join(place, n))]:
            ignored[os.path.join(place, name)] = "a link to a folder; name the folder itself to read it"
        for name in [n for n in folders if (Path(place) / n / MARK).is_file()]:  # with its copies of documents
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
        ignored[str(path)] = f"the suffix {path.suffix!r} is none that is read"
        return False
    if not path.resolve().is_relative_to(inside):
        ignored[str(path)] = "a link that leads out of the folder; name the file itself to read it"
        return False
    return True


def chunk(document: Document, characters: int, *, least: int = 80) -> list[Chunk]:
    """The passages of a document.

    :param characters: the longest passage.
    :param least: a shorter passage, such as a lone page number, says too little and is left out, unless it is all
        there is.
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
