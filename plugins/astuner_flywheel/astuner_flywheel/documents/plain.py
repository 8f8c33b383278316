"""Text and Markdown: bytes to characters, strictly; a byte that is none is named, not replaced.

The encoding is the one that was asked for, else what a byte-order mark says, else UTF-8.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from typing import Any

from astuner_flywheel.documents.inside import Parsed, Unreadable

_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # begins with the mark of UTF-16, so it is looked for first
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


def parse(data: bytes, options: Mapping[str, Any]) -> Parsed:
    """The text, its line ends as \\n."""
    text = decode(data, options.get("encoding"))
    return Parsed((text.replace("\r\n", "\n").replace("\r", "\n"),))


def decode(data: bytes, encoding: str | None, declared: str | None = None) -> str:
    """The characters of a file.

    :param encoding: what the person says it is; None looks for a byte-order mark, then takes ``declared``, then UTF-8.
    :raises Unreadable: it is not in that encoding; names the first byte that is not.
    """
    marked = next((name for mark, name in _MARKS if data.startswith(mark)), None)
    name = encoding or marked or declared or "utf-8"
    try:
        text = data.decode(name)
    except UnicodeDecodeError as e:
        line = data.count(b"\n", 0, e.start) + 1
        raise Unreadable(
            f"is not {name}: byte {e.start + 1:,} (line {line}) is {data[e.start]:#04x}; "
            "say what it is in with encoding, e.g. encoding: cp1252"
        ) from None
    except (LookupError, UnicodeError) as e:
        raise Unreadable(f"cannot be decoded: {e}; correct encoding") from None
    if "\x00" in text:
        raise Unreadable(
            "has zero bytes: it is no text, or it is UTF-16 without a mark (then say so with encoding: utf-16-le)"
        )
    return text.removeprefix("\ufeff")
