"""Read one file inside the confined process, and return its text or a fault.

It runs in a fork that may only read this file and Python's library, so a hostile document cannot affect the parent. PDF
is read page by page with pypdf, DOCX with python-docx, and HTML with Beautiful Soup on Python's parser. Invariant:
exactly one message of plain JSON is returned.
"""

from __future__ import annotations

import hashlib
import io
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from astuner_sandbox.isolation.channel import Channel
from astuner_sandbox.isolation.confine import Confinement, confine

PAGE_BREAK = "\n\n"


class Unreadable(Exception):
    """The file cannot be read. The message is a clause that follows the file's name."""


@dataclass(frozen=True)
class Parsed:
    """Result of a parser: the text of each page (one for formats without pages) and notes on unreadable parts."""

    pages: tuple[str, ...]
    paged: bool = False
    notes: tuple[str, ...] = ()


def warm() -> None:
    """Import the parsers, so that all forks share them."""
    for name in ("bs4", "docx", "docx.table", "pypdf", "astuner_flywheel.documents.inside"):
        import_module(name)


def main(channel: Channel, options: Mapping[str, Any]) -> None:
    """Return ``{"text", "pages", "sha256", "notes"}`` or ``{"fault"}``, with ``{"level"}``, and end the process."""
    level = confine(Confinement(**options["confinement"]))
    try:
        answer = _read(options)
    except Unreadable as e:
        answer = {"fault": str(e)}
    except MemoryError:
        answer = {"fault": f"needs more than {options['memory_mb']} MB of memory to read; raise max_memory_mb"}
    except RecursionError:
        answer = {"fault": "is nested too deeply to be read"}
    except Exception as e:  # parsers may raise any exception for broken files
        answer = {"fault": f"cannot be read as {options['kind']}: {type(e).__name__}: {str(e)[:300]}"}
    channel.send({**answer, "level": level.as_json()})


def _read(options: Mapping[str, Any]) -> dict[str, Any]:
    with open(options["path"], "rb") as file:
        data = file.read(options["bytes"] + 1)
    if len(data) > options["bytes"]:
        raise Unreadable("grew while it was read; repeat the command")
    if not data.strip():
        raise Unreadable("is empty")
    parsed = _PARSERS[options["kind"]](data, options)
    text, starts = _join(parsed)
    if not text.strip():
        raise Unreadable("contains no text")
    if len(text) > options["characters"]:
        raise Unreadable(
            f"has more than {options['characters']:,} characters of text; raise max_characters, or split the file"
        )
    return {
        "sha256": hashlib.sha256(data).hexdigest(),
        "text": text,
        "pages": starts if parsed.paged else [],
        "notes": list(parsed.notes),
    }


def _join(parsed: Parsed) -> tuple[str, list[int]]:
    """Return one text and the start of each page in it."""
    parts, starts, at = [], [], 0
    for page in parsed.pages:
        clean = page.encode("utf-8", "replace").decode("utf-8").replace("\x00", "\ufffd")  # remove lone surrogates
        starts.append(at)
        parts.append(clean)
        at += len(clean) + len(PAGE_BREAK)
    return PAGE_BREAK.join(parts), starts


def _plain(data: bytes, options: Mapping[str, Any]) -> Parsed:
    """Return the text with newlines as line ends."""
    text = decode(data, options.get("encoding"))
    return Parsed((text.replace("\r\n", "\n").replace("\r", "\n"),))


def decode(data: bytes, encoding: str | None, declared: str | None = None) -> str:
    """Decode the characters of a file.

    :param encoding: Encoding set by the user. None: a byte order mark, then ``declared``, then UTF-8.
    :raises Unreadable: The file has another encoding. The message has the first invalid byte.
    """
    from bs4.dammit import EncodingDetector

    data, marked = EncodingDetector.strip_byte_order_mark(data)
    name = encoding or marked or declared or "utf-8"
    try:
        text = data.decode(name)
    except UnicodeDecodeError as e:
        line = data.count(b"\n", 0, e.start) + 1
        raise Unreadable(
            f"is not {name}: byte {e.start + 1:,} (line {line}) is {data[e.start]:#04x}; "
            "set its encoding, e.g. encoding: cp1252"
        ) from None
    except (LookupError, UnicodeError) as e:
        raise Unreadable(f"cannot be decoded: {e}; correct encoding") from None
    if "\x00" in text:
        raise Unreadable("contains zero bytes: it is not text, or UTF-16 without a mark (then set encoding: utf-16-le)")
    return text.removeprefix("\ufeff")


_DROPPED = frozenset({"script", "style", "template", "noscript", "svg", "math", "iframe", "object", "head"})
_BLOCKS = frozenset(
    {"address", "aside", "body", "dd", "details", "div", "dt", "fieldset", "figcaption", "footer", "form", "header"}
    | {"hr", "html", "li", "main", "nav", "summary", "tbody", "tfoot", "thead", "tr"}
)
_PARAGRAPHS = frozenset(
    {"article", "blockquote", "dl", "figure", "h1", "h2", "h3", "h4", "h5", "h6", "ol", "p", "pre", "section", "table"}
    | {"ul"}
)
_LINES = frozenset({"li", "tr"})
"""Elements that follow each other without a blank line."""
_HIDES = re.compile(r"(?:display\s*:\s*none|visibility\s*:\s*hidden)", re.IGNORECASE)
_SPACE = re.compile(r"[ \t\r\n\f]+")


def _html(data: bytes, options: Mapping[str, Any]) -> Parsed:
    """Return the page's title, if any, and its text."""
    from bs4 import BeautifulSoup
    from bs4.dammit import EncodingDetector

    declared = EncodingDetector.find_declared_encoding(data, is_html=True, search_entire_document=False)
    soup = BeautifulSoup(decode(data, options.get("encoding"), declared), "html.parser")
    title = soup.title.get_text(" ", strip=True) if soup.title else ""
    text = _seen(soup)
    return Parsed((f"{title}\n\n{text}" if title and not text.startswith(title) else text,))


def _seen(soup: Any) -> str:
    """Return the text that a browser would show.

    It walks the tree itself, because modifying Beautiful Soup's tree takes time proportional to an element's siblings.
    """
    from bs4 import CData, Tag
    from bs4.element import NavigableString

    parts: list[str] = []
    preformatted = 0
    left: list[Any] = [soup]
    while left:
        node = left.pop()
        if isinstance(node, tuple):  # end of an element: the text after it, and whether it was preformatted
            parts.append(node[0])
            preformatted -= node[1]
        elif isinstance(node, Tag):
            if node.name in _DROPPED or node.has_attr("hidden") or _HIDES.search(str(node.get("style", ""))):
                continue
            if node.name == "br":
                parts.append("\n")
                continue
            around = "\n\n" if node.name in _PARAGRAPHS else "\n" if node.name in _BLOCKS else ""
            parts.append("" if node.name in _LINES else around)
            preformatted += node.name == "pre"
            left.append((" | " if node.name in ("td", "th") else around, node.name == "pre"))
            left.extend(reversed(node.contents))
        elif type(node) in (NavigableString, CData):
            parts.append(str(node) if preformatted else _SPACE.sub(" ", str(node)))
    text = re.sub(r"(?: \|)? *\n", "\n", "".join(parts))  # remove the separator after the last cell of a row
    text = re.sub(r"\n (?=\S)", "\n", text)  # white space between blocks is not displayed
    return re.sub(r"\n{3,}", "\n\n", text).strip()


_UNFOLDED_PER_CHARACTER = 100
"""Maximum bytes of XML and images per character of text. Archives that exceed it are treated as bombs."""


def _docx(data: bytes, options: Mapping[str, Any]) -> Parsed:
    """Return one text. Cells of a table row are separated by `` | ``.

    :raises Unreadable: The file is not a DOCX, is locked, or unpacks to too much data.
    """
    import docx
    from docx.opc.exceptions import OpcError

    if data.startswith(b"\xd0\xcf\x11\xe0"):
        raise Unreadable("is locked with a password, or an old .doc; save it as .docx without a password")
    try:
        _measure(data, options)
        document = docx.Document(io.BytesIO(data))
    except zipfile.BadZipFile as e:
        raise Unreadable(f"is a damaged DOCX: {e}; open it in a word processor and save it again") from None
    except (OpcError, KeyError, ValueError) as e:
        raise Unreadable(f"is an archive, but not a DOCX: {e}") from None
    return Parsed(("\n\n".join(_blocks(document)),))


def _measure(data: bytes, options: Mapping[str, Any]) -> None:
    most = max(options["characters"] * _UNFOLDED_PER_CHARACTER, 2 * len(data))
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        unfolded = sum(entry.file_size for entry in archive.infolist())  # zipfile never unpacks more than this
        xml = sum(e.file_size for e in archive.infolist() if e.filename.endswith((".xml", ".rels")))
        if unfolded > most or xml > options["memory_mb"] << 16:  # a tree needs about ten times the size of its text
            raise Unreadable(
                f"unpacks to {max(unfolded, xml) >> 20:,} MB and may be an archive bomb; if not, raise "
                "max_characters and max_memory_mb"
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
    for cell in row.cells:  # merged cells occur once per spanned column
        if cell._tc not in seen:
            seen.add(cell._tc)
            cells.append("\n".join(_paragraph(p) for p in cell.paragraphs).strip())
    return " | ".join(cells)


def _paragraph(paragraph: Any) -> str:
    parts = []
    for item in paragraph.iter_inner_content():
        for run in getattr(item, "runs", [item]):  # links contain runs
            if not run.font.hidden:
                parts.append(run.text)
    return "".join(parts)


def _pdf(data: bytes, options: Mapping[str, Any]) -> Parsed:
    """Return the text of every page.

    :raises Unreadable: The file is damaged or locked, has too many pages, or has no text.
    """
    from pypdf import PdfReader
    from pypdf.errors import DependencyError, PyPdfError

    try:
        reader = PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):  # many files only forbid printing and need no password
            raise Unreadable("is locked with a password; save it without one")
        count = len(reader.pages)
        if count > options["pages"]:
            raise Unreadable(f"has {count:,} pages, more than {options['pages']:,}; raise max_pages")
        pages = _texts(reader, options["characters"])
    except DependencyError as e:
        raise Unreadable(f"has an encryption that needs another package for pypdf ({e}); save it without") from None
    except PyPdfError as e:
        raise Unreadable(f"is a damaged PDF: {e}; open it in a viewer and save it again") from None
    if not count:
        raise Unreadable("is a PDF without pages")
    without = [number for number, page in enumerate(pages, start=1) if not page.strip()]
    if len(without) == count:
        raise Unreadable(
            f"has no text on any of its {count} pages and is probably scanned; run text recognition first, e.g. "
            "ocrmypdf"
        )
    notes = (f"{len(without)} of {count} pages have no text ({_some(without)})",) if without else ()
    return Parsed(tuple(pages), paged=True, notes=notes)


def _texts(reader: Any, characters: int) -> list[str]:
    """Return the texts of the pages. Stop early if a file has far too much text."""
    pages, total = [], 0
    for page in reader.pages:
        pages.append(page.extract_text())
        total += len(pages[-1])
        if total > characters:
            raise Unreadable(
                f"has more than {characters:,} characters of text; raise max_characters, or split the file"
            )
    return pages


def _some(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:5]))
    return shown if len(numbers) <= 5 else f"{shown}, …"


_PARSERS: dict[str, Callable[[bytes, Mapping[str, Any]], Parsed]] = {
    "pdf": _pdf,
    "docx": _docx,
    "html": _html,
    "markdown": _plain,
    "text": _plain,
}
