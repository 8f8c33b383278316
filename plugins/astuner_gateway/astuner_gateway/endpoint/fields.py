"""Describe which fields a request object may have and read each of them.

A *reader* receives a value that is not null and its path; it returns the converted value or raises `ApiError`. A field
is honored (it has a reader), accepted without effect for harmless values, or rejected with a reason; the tables of the
last two are in ``not_honoured.yaml``. Null counts as absent. Invariant: an unknown field is rejected by name, so no
part of a request is silently dropped. Exception: clients add notes to messages of the history (`Said`); unknown fields
there are left out and counted (`counted`).
"""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from astuner_gateway.endpoint.errors import ApiError, refused

Reader = Callable[[Any, str], Any]

MOST_ITEMS = 10_000
"""Maximum number of items in a list of messages, parts or tools."""
_LONGEST_NAME = 64


@dataclass(frozen=True)
class Field:
    """How one field is handled."""

    read: Reader | None = None
    """Reader of an honored field. If it returns None, the field counts as absent."""
    harmless: tuple[Any, ...] = ()
    """Values without effect."""
    always_harmless: bool = False
    why: str = ""
    """Reason why other values are rejected, as a clause."""


LABEL = Field(always_harmless=True)
"""Field for accounting, caching or storage, which does not affect the answer."""


_TABLES: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("not_honoured.yaml").read_text(encoding="utf-8"))


def not_honoured(table: str) -> dict[str, Field]:
    """Return the fields of a table in ``not_honoured.yaml`` by name."""
    told = _TABLES[table]
    given = told.get("refused", {})
    refused = {name: Field(harmless=tuple(f.get("passes", ())), why=f["why"]) for name, f in given.items()}
    return {**dict.fromkeys(told.get("labels", "").split(), LABEL), **refused}


class Shape:
    """Reader of an object with these fields.

    :param needed: Names of the required honored fields, separated by spaces.
    :param labels: Names of fields without effect, separated by spaces.
    :param fields: Fields by name; a reader marks an honored field.
    """

    def __init__(self, needed: str = "", labels: str = "", /, **fields: Reader | Field) -> None:
        self.needed = needed.split()
        self.fields = {name: each if isinstance(each, Field) else Field(each) for name, each in fields.items()}
        self.fields |= dict.fromkeys(labels.split(), LABEL)

    def __call__(self, value: Any, path: str = "") -> dict[str, Any]:
        """Return the honored fields of ``value`` by name.

        :raises ApiError: 400 with the path of a field that is invalid, missing, or neither honored nor harmless.
        """
        given, before = mapping(value, path), f"{path}." if path else ""
        found = {}
        for name, each in given.items():
            if each is None:
                continue
            if (field := self.fields.get(name)) is None:
                self._unknown(name, each, before)
            elif field.read is not None:
                if (read := field.read(each, before + name)) is not None:
                    found[name] = read
            elif not field.always_harmless and not any(_equal(each, harmless) for harmless in field.harmless):
                allowed = " or ".join(json.dumps(harmless) for harmless in field.harmless)
                instead = f"Leave it out or send {allowed}" if allowed else "Leave it out"
                raise refused(before + name, f"is {shown(each)}, which is not supported: {field.why}. {instead}")
        for name in self.needed:
            if name not in found and (read := self.fields[name].read) is not None:
                read(None, before + name)  # raises the error for a missing value
        return found

    def _unknown(self, name: str, value: Any, before: str) -> None:
        # Comparison takes quadratic time in the length.
        near = difflib.get_close_matches(name, self.fields, n=1, cutoff=0.8) if len(name) <= _LONGEST_NAME else []
        meant = f"Did you mean {near[0]!r}?" if near else "Leave it out"
        raise refused(before + name[:200], f"is not a known field. {meant}", code="unknown_field")


_left_out: ContextVar[Counter[str] | None] = ContextVar("left_out", default=None)


def counted(shape: Shape, value: Any) -> tuple[dict[str, Any], Mapping[str, int]]:
    """Read a body with ``shape`` and count, by name, the unknown fields in its messages."""
    names = Counter[str]()
    token = _left_out.set(names)
    try:
        return shape(value), names
    finally:
        _left_out.reset(token)


class Said(Shape):
    """Reader of a part of a conversation: unknown fields do not affect the prompt and are left out."""

    def _unknown(self, name: str, value: Any, before: str) -> None:
        names = _left_out.get()
        if names is not None and value not in ({}, [], ""):
            names[name[:_LONGEST_NAME]] += 1


def _equal(value: Any, other: Any) -> bool:
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def shown(value: Any) -> str:
    """Return a value for a message, shortened."""
    text = json.dumps(value[:80] if isinstance(value, str) else value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "…"


def wrong(path: str, value: Any, kind: str) -> ApiError:
    """Return a 400 error for a value of the wrong type."""
    what = "missing" if value is None else shown(value)
    return refused(path, f"is {what}, but must be {kind}", code="invalid_type")


# ---- readers ---------------------------------------------------------------------------------------------------------


def anything(value: Any, path: str) -> Any:
    """Return the value unchanged, for fields that are read later with more context."""
    return value


def text(value: Any, path: str) -> str:
    """Read a string."""
    if not isinstance(value, str):
        raise wrong(path, value, "a text")
    return value


def word(value: Any, path: str) -> str:
    """Read a non-empty string."""
    if not isinstance(value, str) or not value:
        raise wrong(path, value, "a non-empty string")
    return value


def flag(value: Any, path: str) -> bool:
    """Read a boolean."""
    if not isinstance(value, bool):
        raise wrong(path, value, "true or false")
    return value


def mapping(value: Any, path: str) -> dict[str, Any]:
    """Read an object."""
    if not isinstance(value, dict):
        raise wrong(path, value, "an object")
    return value


def number(low: float, high: float | None = None, *, whole: bool = False) -> Reader:
    """Return a reader of numbers within bounds."""
    kinds, name = (int, "an integer") if whole else ((int, float), "a number")
    bounds = f"at least {low}" + ("" if high is None else f" and at most {high}")

    def read(value: Any, path: str) -> float:
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise wrong(path, value, name)
        if value < low or (high is not None and value > high):
            raise wrong(path, value, bounds)
        return value

    return read


def one_of(*allowed: str) -> Reader:
    """Return a reader of one of these words."""

    def read(value: Any, path: str) -> str:
        if not isinstance(value, str) or value not in allowed:
            raise wrong(path, value, "one of " + ", ".join(allowed))
        return value

    return read


def items(each: Reader) -> Callable[[Any, str], list[Any]]:
    """Return a reader of lists whose items ``each`` reads."""

    def read(value: Any, path: str) -> list[Any]:
        if not isinstance(value, list):
            raise wrong(path, value, "a list")
        if len(value) > MOST_ITEMS:
            raise refused(path, f"has {len(value)} items, but at most {MOST_ITEMS} are allowed", code="too_many_items")
        return [each(item, f"{path}[{i}]") for i, item in enumerate(value)]

    return read


def text_or(part: Reader, *, may_be_empty: bool = False) -> Callable[[Any, str], str | list[Any]]:
    """Return a reader of message contents: a string, or a list with at least one part."""
    parts = items(part)

    def read(value: Any, path: str) -> str | list[Any]:
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise wrong(path, value, "a string or a list of parts")
        if not value and not may_be_empty:
            raise refused(path, "is empty, but must be a string or a list with at least one part", code="invalid_type")
        return parts(value, path)

    return read


def tagged(readers: Mapping[str, Reader], why: str, *, default: str = "") -> Reader:
    """Return a reader of objects whose ``type`` selects the reader.

    :param why: Clause that the error for any other type contains.
    :param default: Type of an object that names none; empty if the type is required.
    """

    def read(value: Any, path: str) -> Any:
        kind = mapping(value, path).get("type")
        if kind is None and default:
            kind = default
        if not isinstance(kind, str) or kind not in readers:
            raise refused(f"{path}.type", f"is {shown(kind)}, but {why}")
        return readers[kind](value, path)

    return read
