"""Text of a Word document (DOCX): paragraphs and tables in their order, by python-docx.

Hidden text, comments, headers and footers are left out.  What the archive unfolds to is measured before any of it is
unpacked.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

from astuner_flywheel.documents.inside import Parsed, Unreadable

_UNFOLDED_PER_CHARACTER = 100
"""Bytes of XML and pictures for a character of text; an archive with more than that for the longest text is a bomb."""


def parse(data: bytes, options: Mapping[str, Any]) -> Parsed:
    """One text; cells of a table row are separated by `` | ``.

    :raises Unreadable: it is no DOCX, it is locked, or it unfolds to too much.
    """
    import docx
    from docx.opc.exceptions import OpcError

    if data.startswith(b"\xd0\xcf\x11\xe0"):
        raise Unreadable("is locked with a password, or an old .doc: save it as .docx without a password")
    try:
        _measure(data, options)
        document = docx.Document(io.BytesIO(data))
    except zipfile.BadZipFile as e:
        raise Unreadable(f"is a damaged DOCX: {e}; open it in a word processor and save it again") from None
    except (OpcError, KeyError, ValueError) as e:
        raise Unreadable(f"is an archive, but no DOCX: {e}") from None
    return Parsed(("\n\n".join(_blocks(document)),))


def _measure(data: bytes, options: Mapping[str, Any]) -> None:
    most = max(options["characters"] * _UNFOLDED_PER_CHARACTER, 2 * len(data))
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        unfolded = sum(entry.file_size for entry in archive.infolist())  # zipfile never unpacks more than that
        xml = sum(e.file_size for e in archive.infolist() if e.filename.endswith((".xml", ".rels")))
        if unfolded > most or xml > options["memory_mb"] << 16:  # a tree takes some ten times its text
            raise Unreadable(
                f"unfolds to {max(unfolded, xml) >> 20:,} MB: it is an archive bomb, or max_characters and "
                "max_memory_mb must be raised"
            )


def _blocks(document: Any) -> Iterator[str]:
    from docx.table import Table

    for block in document.iter_inner_content():
        if isinstance(block, Table):
            rows = (_row(row) for row in block.rows)
            text = "\n".join(row for row in rows if row.strip(" |"))
        else:
            text = _paragraph(block)
        if text.strip():
            yield text


def _row(row: Any) -> str:
    seen, cells = set(), []
    for cell in row.cells:  # a merged cell is there once for each column it spans
        if cell._tc not in seen:
            seen.add(cell._tc)
            cells.append("\n".join(_paragraph(p) for p in cell.paragraphs).strip())
    return " | ".join(cells)


def _paragraph(paragraph: Any) -> str:
    parts = []
    for item in paragraph.iter_inner_content():
        for run in getattr(item, "runs", [item]):  # a link has runs of its own
            if not run.font.hidden:
                parts.append(run.text)
    return "".join(parts)
