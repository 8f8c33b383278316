"""Text of an HTML page as a person sees it, by Beautiful Soup on Python's own parser.

Scripts, styles, and what the page hides are left out; a block begins on a line of its own; white space means what it
means in a browser.  Invariant: no recursion, so nesting of any depth is harmless.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from astuner_flywheel.documents.inside import Parsed
from astuner_flywheel.documents.plain import decode

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
"""One after the other, without a blank line between them."""
_HIDES = re.compile(r"(?:display\s*:\s*none|visibility\s*:\s*hidden)", re.IGNORECASE)
_SPACE = re.compile(r"[ \t\r\n\f]+")


def parse(data: bytes, options: Mapping[str, Any]) -> Parsed:
    """The page's title (if it has one) and its text."""
    from bs4 import BeautifulSoup
    from bs4.dammit import EncodingDetector

    declared = EncodingDetector.find_declared_encoding(data, is_html=True, search_entire_document=False)
    soup = BeautifulSoup(decode(data, options.get("encoding"), declared), "html.parser")
    title = soup.title.get_text(" ", strip=True) if soup.title else ""
    text = _text(soup)
    return Parsed((f"{title}\n\n{text}" if title and not text.startswith(title) else text,))


def _text(soup: Any) -> str:
    from bs4 import CData, Tag
    from bs4.element import NavigableString

    parts: list[str] = []
    preformatted = 0
    left: list[Any] = [soup]
    while left:
        node = left.pop()
        if isinstance(node, _End):
            parts.append(node.text)
            preformatted -= node.preformatted
        elif isinstance(node, Tag):
            if node.name in _DROPPED or node.has_attr("hidden") or _HIDES.search(str(node.get("style", ""))):
                continue
            if node.name == "br":
                parts.append("\n")
                continue
            around = "\n\n" if node.name in _PARAGRAPHS else "\n" if node.name in _BLOCKS else ""
            after = " | " if node.name in ("td", "th") else around
            parts.append("" if node.name in _LINES else around)
            preformatted += node.name == "pre"
            left.append(_End(after, node.name == "pre"))
            left.extend(reversed(node.contents))
        elif type(node) in (NavigableString, CData):
            parts.append(str(node) if preformatted else _SPACE.sub(" ", str(node)))
    return _tidy("".join(parts))


class _End:
    """The end of an element, on the way through the tree."""

    def __init__(self, text: str, preformatted: bool) -> None:
        self.text, self.preformatted = text, preformatted


def _tidy(text: str) -> str:
    text = re.sub(r"(?: \|)? *\n", "\n", text)  # the last cell of a row has none after it
    text = re.sub(r"\n (?=\S)", "\n", text)  # white space between two blocks is shown nowhere
    return re.sub(r"\n{3,}", "\n\n", text).strip()
