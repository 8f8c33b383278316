"""Which fields a request may have, as tables, and typed access to them.

A field is honoured (read by the dialect), harmless for the values that change nothing here, or refused with the reason.
Null is the same as absent.  Invariant: a field that is in no table is refused by its name, so that nothing which a
request asks for is silently dropped.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from astuner_gateway.endpoint.errors import ApiError, refused

MOST_ITEMS = 10_000
"""Of one list: messages, parts, tools."""
_LONGEST_NAME = 64


@dataclass(frozen=True)
class Field:
    """What becomes of one field."""

    honoured: bool = False
    harmless: tuple[Any, ...] = ()
    """The values that change nothing."""
    always_harmless: bool = False
    why: str = ""
    """Why other values are refused; continues "…, which"."""


HONOURED = Field(honoured=True)
LABEL = Field(always_harmless=True)
"""Accounting, caching, storage: changes nothing about the answer."""


def only(*harmless: Any, why: str) -> Field:
    """A field that passes for these values."""
    return Field(harmless=harmless, why=why)


def never(why: str) -> Field:
    """A field that is refused unless it is null."""
    return Field(why=why)


Table = Mapping[str, Field]


def same(field: Field, names: str) -> Table:
    """The same for all of these, which are words with spaces between them."""
    return dict.fromkeys(names.split(), field)


def check(body: Mapping[str, Any], table: Table, path: str = "") -> None:
    """Refuse what is neither honoured nor harmless.

    :param path: what stands before the fields' names, such as ``tools[0].``.
    :raises ApiError: 400 with the field's path.
    """
    for name, value in body.items():
        field = table.get(name)
        if value is None or (field is not None and (field.honoured or field.always_harmless)):
            continue
        if field is None:
            # Comparing takes the square of the length.
            near = difflib.get_close_matches(name, table, n=1, cutoff=0.8) if len(name) <= _LONGEST_NAME else []
            meant = f"did you mean {near[0]!r}?" if near else "leave it out"
            raise refused(path + name[:200], f"is a field that ASTuner does not know; {meant}", code="unknown_field")
        if not any(_equal(value, harmless) for harmless in field.harmless):
            allowed = " or ".join(json.dumps(harmless) for harmless in field.harmless)
            instead = f"leave it out, or send {allowed}" if allowed else "leave it out"
            raise refused(path + name, f"is {shown(value)}, which {field.why}; {instead}")


def _equal(value: Any, other: Any) -> bool:
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def shown(value: Any) -> str:
    """A value for a message, shortened."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "…"


def _wrong(path: str, value: Any, kind: str) -> ApiError:
    what = "missing" if value is None else shown(value)
    return refused(path, f"is {what}; it must be {kind}", code="invalid_type")


def text(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise _wrong(path, value, "a text")
    return value


def word(value: Any, path: str) -> str:
    """A text that is not empty."""
    if not isinstance(value, str) or not value:
        raise _wrong(path, value, "a text that is not empty")
    return value


def optional_text(value: Any, path: str) -> str | None:
    return None if value is None else text(value, path)


def flag(value: Any, path: str) -> bool:
    """True or false; null is false."""
    if value is not None and not isinstance(value, bool):
        raise _wrong(path, value, "true or false")
    return bool(value)


def whole(value: Any, path: str, low: int | None = None, high: int | None = None) -> int | None:
    """A whole number within bounds; null is None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong(path, value, "a whole number")
    return int(_within(value, path, low, high))


def number(value: Any, path: str, low: float | None = None, high: float | None = None) -> float | None:
    """A number within bounds; null is None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _wrong(path, value, "a number")
    return _within(value, path, low, high)


def _within(value: float, path: str, low: float | None, high: float | None) -> float:
    if (low is not None and value < low) or (high is not None and value > high):
        bounds = [f"at least {low}"] if low is not None else []
        bounds += [f"at most {high}"] if high is not None else []
        raise _wrong(path, value, " and ".join(bounds))
    return value


def mapping(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(path, value, "an object")
    return value


def optional_mapping(value: Any, path: str) -> dict[str, Any]:
    """An object; null is an empty one."""
    return {} if value is None else mapping(value, path)


def items(value: Any, path: str) -> list[Any]:
    if not isinstance(value, list):
        raise _wrong(path, value, "a list")
    if len(value) > MOST_ITEMS:
        raise refused(path, f"has {len(value)} items; it may have {MOST_ITEMS}", code="too_many_items")
    return value


def optional_items(value: Any, path: str) -> list[Any]:
    """A list; null is an empty one."""
    return [] if value is None else items(value, path)


def text_or_parts(value: Any, path: str) -> str | list[Any]:
    """What a message says: a text, or a list with at least one part."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _wrong(path, value, "a text, or a list of parts")
    if not value:
        raise refused(path, "is empty; it must be a text, or a list with at least one part", code="invalid_type")
    return items(value, path)


def one_of(value: Any, path: str, allowed: Sequence[str]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise _wrong(path, value, "one of " + ", ".join(allowed))
    return value
