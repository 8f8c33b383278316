"""From bytes to a JSON object that is safe to work on.

Refused is what Python's parser lets through and later code stumbles over: NaN and infinities (also as ``1e999``), and
nesting that ends in a `RecursionError` elsewhere.  Halves of surrogate pairs pass: a model can write them, and what is
answered is ASCII.
"""

from __future__ import annotations

import json
import math
from typing import Any

MAX_DEPTH = 100


def parse(raw: bytes) -> dict[str, Any]:
    """The JSON object in ``raw``.

    :raises ValueError: there is none; says why.
    """
    try:
        found = json.loads(raw.decode("utf-8"), parse_constant=_refuse, parse_float=_finite)
    except RecursionError:
        raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep") from None
    if not isinstance(found, dict):
        raise ValueError(f"it is no object, but {type(found).__name__}")
    level: list[Any] = [found]
    for _ in range(MAX_DEPTH):
        level = [item for container in level for item in _items(container) if isinstance(item, (dict, list))]
        if not level:
            return found
    raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")


def _items(container: Any) -> Any:
    return container.values() if isinstance(container, dict) else container


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is too large for a number")
    return number
