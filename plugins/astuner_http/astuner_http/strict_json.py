"""Parse the bytes of a request to a JSON object that is safe to process.

Rejected are values that Python's parser accepts but later code cannot handle: NaN and infinities (also ``1e999``),
nesting that causes a `RecursionError` and, unless allowed, halves of surrogate pairs, which have no UTF-8 encoding.
Invariant: the result can be written as JSON again.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

MAX_DEPTH = 100
"""Maximum nesting of objects and arrays. A tool's JSON schema has about ten levels."""

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_json(raw: bytes, *, halves: bool = False) -> dict[str, Any]:
    """Return the JSON object in ``raw``.

    :param halves: Accept halves of surrogate pairs, for callers that answer in ASCII; models can write them.
    :raises ValueError: It is invalid; the message continues a sentence such as "the body is not valid JSON: …".
    """
    try:
        found = json.loads(raw.decode("utf-8"), parse_constant=_refuse, parse_float=_finite)
    except UnicodeDecodeError as e:
        raise ValueError(f"it is not UTF-8 from byte {e.start} on") from None
    except RecursionError:
        raise _too_deep() from None
    # Other ValueErrors come from the parser, also for integers with more digits than Python converts.
    if not isinstance(found, dict):
        raise ValueError(f"it is not an object, but {type(found).__name__}")
    _check_depth(found)
    if not halves and _SURROGATE.search(raw):
        try:
            _encode(found)
        except UnicodeEncodeError:
            raise ValueError("a string in it has half of a surrogate pair, which is not a character") from None
    return found


def _check_depth(found: Any) -> None:
    level = [found]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for container in level
            for item in (container.values() if type(container) is dict else container)
            if type(item) is dict or type(item) is list  # the parser returns no other types; faster than isinstance
        ]
        if not level:
            return
    raise _too_deep()


def _encode(found: Any) -> None:
    """Encode text by text, because a single call would block all threads until it returns."""
    if isinstance(found, str):
        found.encode("utf-8")
    elif isinstance(found, (dict, list)):
        for item in (*found, *found.values()) if isinstance(found, dict) else found:
            _encode(item)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is too large for a number")
    return number


def _too_deep() -> ValueError:
    return ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
