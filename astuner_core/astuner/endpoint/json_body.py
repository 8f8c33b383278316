"""From the bytes of a request to a JSON object that is safe to work on.

What Python's parser lets through and later code stumbles over is refused here: NaN and infinities (also as ``1e999``),
nesting that ends in a `RecursionError` elsewhere, halves of surrogate pairs, which have no UTF-8.  Invariant: what
comes out can be written as JSON and encoded again.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from astuner.endpoint.errors import ApiError

MAX_BYTES = 32 << 20
MAX_DEPTH = 100
"""Levels of objects and arrays; a JSON schema of a tool has about ten."""

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse(raw: bytes) -> dict[str, Any]:
    """The JSON object in ``raw``.

    :raises ApiError: 400, there is none.
    """
    try:
        body = json.loads(raw.decode("utf-8"), parse_constant=_refuse, parse_float=_finite)
    except UnicodeDecodeError as e:
        raise _not_json(f"it is not UTF-8 from byte {e.start} on") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError as e:  # also: an integer with more digits than Python converts
        raise _not_json(str(e)) from None
    if not isinstance(body, dict):
        raise _not_json(f"it is not an object, but {type(body).__name__}")
    _check_depth(body)
    if _SURROGATE.search(raw):
        try:
            json.dumps(body, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise _not_json("a text in it has half of a surrogate pair, which is no character") from None
    return body


def _check_depth(body: Any) -> None:
    level = [body]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for container in level
            for item in (container.values() if isinstance(container, dict) else container)
            if isinstance(item, (dict, list))
        ]
        if not level:
            return
    raise _too_deep()


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is too large for a number")
    return number


def _too_deep() -> ApiError:
    return _not_json(f"it is nested more than {MAX_DEPTH} levels deep")


def _not_json(why: str) -> ApiError:
    return ApiError(400, f"the request's body cannot be read as JSON: {why}", code="invalid_json")
