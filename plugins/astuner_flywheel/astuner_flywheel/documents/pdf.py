"""Text of a PDF, page by page, by pypdf; pictures of text are not read, and said so."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from astuner_flywheel.documents.inside import Parsed, Unreadable


def parse(data: bytes, options: Mapping[str, Any]) -> Parsed:
    """The text of every page.

    :raises Unreadable: it is damaged, locked, has too many pages, or no page has text.
    """
    from pypdf import PdfReader
    from pypdf.errors import DependencyError, PyPdfError

    try:
        reader = PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):  # many only forbid printing, and open without a password
            raise Unreadable("is locked with a password; save it without one")
        count = len(reader.pages)
        if count > options["pages"]:
            raise Unreadable(f"has {count:,} pages, more than {options['pages']:,}; max_pages raises that")
        pages = _texts(reader, options["characters"])
    except DependencyError as e:
        raise Unreadable(f"is encrypted in a way that pypdf needs another package for ({e}); save it without") from None
    except PyPdfError as e:
        raise Unreadable(f"is a damaged PDF: {e}; open it in a viewer and save it again") from None
    if not count:
        raise Unreadable("is a PDF without a page")
    without = [number for number, page in enumerate(pages, start=1) if not page.strip()]
    if len(without) == count:
        raise Unreadable(
            f"has no text on any of its {count} pages: it is probably scanned; run a text recognition on it first, "
            "e.g. ocrmypdf"
        )
    notes = (f"{len(without)} of {count} pages have no text ({_some(without)})",) if without else ()
    return Parsed(tuple(pages), paged=True, notes=notes)


def _texts(reader: Any, characters: int) -> list[str]:
    """Stops early in a file that has far too much: a page can unfold to more than the file."""
    pages, total = [], 0
    for page in reader.pages:
        pages.append(page.extract_text())
        total += len(pages[-1])
        if total > characters:
            raise Unreadable(
                f"has more than {characters:,} characters of text; max_characters raises that, or split the file"
            )
    return pages


def _some(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:5]))
    return shown if len(numbers) <= 5 else f"{shown}, …"
