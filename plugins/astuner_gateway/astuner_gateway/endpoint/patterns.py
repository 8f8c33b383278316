"""How long a regular expression that a client sent may take, before it is ever run.

Its parse tree is bounded by ``factor * length ** exponent``.  What cannot be bounded so (a repetition of something that
itself can match in several ways, a reference back, a look around) is refused.  Invariant: nothing is matched here.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
from dataclasses import dataclass
from typing import Any

MOST_CHARACTERS = 200
MOST_WORK = 10_000_000
"""Steps of one search, about 0.1 s."""

_SMALL = 8
"""Times that something may be repeated which itself repeats."""
_MANY = 64
"""More repetitions than these count as any number."""
_MOST_FACTOR, _MOST_EXPONENT = 1000, 4

_parser: Any = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")


@dataclass(frozen=True)
class Work:
    """The most steps of a search."""

    factor: int = 1
    exponent: int = 0
    repeats: bool = False

    def steps(self, length: int) -> int:
        """In a text of ``length`` characters."""
        return self.factor * int(max(length, 1) ** self.exponent)


@functools.lru_cache(maxsize=256)
def work_of(pattern: str) -> Work:
    """What searching for ``pattern`` costs.

    :raises ValueError: it is no regular expression, or its cost has no bound; reads on after "is a pattern that".
    """
    if len(pattern) > MOST_CHARACTERS:
        raise ValueError(f"has more than {MOST_CHARACTERS} characters")
    try:
        tree = list(_parser.parse(pattern))
    except (re.error, OverflowError, RecursionError) as e:
        raise ValueError(f"is no regular expression ({e})") from None
    found = _sequence(tree)
    anchored = bool(tree) and str(tree[0][0]) == "AT" and str(tree[0][1]).startswith("AT_BEGINNING")
    found = Work(found.factor, found.exponent + (not anchored), found.repeats)
    if found.factor > _MOST_FACTOR or found.exponent > _MOST_EXPONENT:
        raise ValueError("can take too long; use fewer repetitions and alternatives")
    return found


def _sequence(nodes: Any) -> Work:
    factor, exponent, repeats = 1, 0, False
    for node in nodes:
        each = _node(str(node[0]), node[1])
        factor, exponent, repeats = min(factor * each.factor, 10**9), exponent + each.exponent, repeats or each.repeats
    return Work(factor, exponent, repeats)


def _node(kind: str, value: Any) -> Work:
    if kind in ("LITERAL", "NOT_LITERAL", "IN", "ANY", "AT", "CATEGORY", "RANGE"):
        return Work()
    if kind == "SUBPATTERN":
        return _sequence(value[-1])
    if kind == "BRANCH":
        ways = [_sequence(way) for way in value[1]]
        return Work(sum(w.factor for w in ways), max(w.exponent for w in ways), any(w.repeats for w in ways))
    if kind in ("MAX_REPEAT", "MIN_REPEAT"):
        low, high, inner = int(value[0]), int(value[1]), _sequence(value[2])
        if high > _MANY:
            if inner.factor > 1 or inner.repeats:
                raise ValueError("repeats something that can match in several ways, which can take too long")
            return Work(1, 1, True)
        if not inner.repeats and inner.factor == 1:
            return Work(high - low + 1, 0, True)
        if high > _SMALL:
            raise ValueError("repeats something that can match in several ways, which can take too long")
        factor = max(high, 1) * (high - low + 1) * inner.factor**high
        return Work(min(factor, 10**9), inner.exponent * high, True)
    raise ValueError(f"has what is not supported here ({kind.lower()}), since it can take too long")
