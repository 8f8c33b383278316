"""From the bytes of a request to a JSON object that is safe to work on.

What Python's parser lets through and later code stumbles over is refused here: NaN and infinities (also as ``1e999``),
nesting that ends in a `RecursionError` elsewhere and, where it is asked for, halves of surrogate pairs, which have no
UTF-8.  Invariant: what comes out can be written as JSON again.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

MAX_DEPTH = 100
"""Levels of objects and arrays; a JSON schema of a tool has about ten."""

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_json(raw: bytes, *, halves: bool = False) -> dict[str, Any]:
    """The JSON object in ``raw``.

    :param halves: let halves of surrogate pairs pass, for who answers in ASCII; a model can write them.
    :raises ValueError: there is none; says why, for a sentence such as "the body is no JSON: …".
    """
    try:
        found = json.loads(raw.decode("utf-8"), parse_constant=_refuse, parse_float=_finite)
    except UnicodeDecodeError as e:
        raise ValueError(f"it is not UTF-8 from byte {e.start} on") from None
    except RecursionError:
        raise _too_deep() from None
    # Another ValueError is the parser's own; also for an integer with more digits than Python converts.
    if not isinstance(found, dict):
        raise ValueError(f"it is not an object, but {type(found).__name__}")
    _check_depth(found)
    if not halves and _SURROGATE.search(raw):
        try:
            _encode(found)
        except UnicodeEncodeError:
            raise ValueError("a text in it has half of a surrogate pair, which is no character") from None
    return found


def _check_depth(found: Any) -> None:
    level = [found]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for container in level
            for item in (container.values() if type(container) is dict else container)
            if type(item) is dict or type(item) is list  # the parser makes no others; half the time of isinstance
        ]
        if not level:
            return
    raise _too_deep()


def _encode(found: Any) -> None:
    """Text by text, since a call holds up all threads until it returns."""
    if isinstance(found, str):
        found.encode("utf-8")
    elif isinstance(found, (dict, list)):
        for item in (*found, *found.values()) if isinstance(found, dict) else found:
            _encode(item)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is too large for a number")
    return number


def _too_deep() -> ValueError:
    return ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
