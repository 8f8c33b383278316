"""Find the answer in a text: what is in the last box, after GSM8K's ``####``, or the last number.

Everything here is linear in the length of the text, whatever a model writes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_BOX_PARTS = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_NUMBER = re.compile(r"(?<![\w.,])[-+]?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?(?:\s?\\?%)?")


def last_boxed(text: str) -> str | None:
    r"""The content of the last complete ``\boxed{…}`` (or ``\fbox{…}``), nested braces included; None without one.

    A box that is never closed (the model was cut off) is no box.
    """
    found: tuple[int, int] | None = None
    open_braces: list[int | None] = []  # where a box's content starts; None for any other brace
    for part in _BOX_PARTS.finditer(text):
        token = part[0]
        if token == "{":
            open_braces.append(None)
        elif token == "}":
            start = open_braces.pop() if open_braces else None
            if start is not None:
                found = (start, part.start())
        elif token.endswith("{") and len(token) > 2:
            open_braces.append(part.end())
    return text[found[0] : found[1]] if found else None


def last_number(text: str) -> str | None:
    """The last number in plain text, with its sign, thousands separators, fraction and percent sign."""
    matches = _NUMBER.findall(text)
    return matches[-1] if matches else None


def reference_answer(metadata: Mapping[str, Any], field: str) -> str | None:
    """The reference in ``metadata[field]``: what follows GSM8K's last ``####``, else the last box, else all of it.

    None when the field is missing, empty, or neither text nor a number.
    """
    value = metadata.get(field)
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return None
    text = str(value)
    answer = text.rpartition("####")[2] if "####" in text else last_boxed(text) or text
    return answer.strip() or None
