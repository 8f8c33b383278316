"""Shapes of requests: which fields an object may have, and how each is read.

A *reader* takes a value that is not null and its path, and returns what is made of it or raises `ApiError`.  A field is
honoured (it has a reader), harmless for the values that change nothing here, or refused with the reason; tables of the
latter two are in ``not_honoured.yaml``.  Null is the same as absent.  Invariant: a field that is in no shape is refused
by its name, so that nothing which a request asks for is silently dropped; but in what was said (`Said`), where clients
leave notes of their own, it is left out and counted (`counted`).
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
"""Of one list: messages, parts, tools."""
_LONGEST_NAME = 64


@dataclass(frozen=True)
class Field:
    """What becomes of one field."""

    read: Reader | None = None
    """Reads a field that is honoured; where it returns None, the field is as good as absent."""
    harmless: tuple[Any, ...] = ()
    """The values that change nothing."""
    always_harmless: bool = False
    why: str = ""
    """Why other values are refused; continues "…, which"."""


LABEL = Field(always_harmless=True)
"""Accounting, caching, storage: changes nothing about the answer."""


_TABLES: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("not_honoured.yaml").read_text(encoding="utf-8"))


def not_honoured(table: str) -> dict[str, Field]:
    """The fields of a table in ``not_honoured.yaml``, by name."""
    told = _TABLES[table]
    given = told.get("refused", {})
    refused = {name: Field(harmless=tuple(f.get("passes", ())), why=f["why"]) for name, f in given.items()}
    return {**dict.fromkeys(told.get("labels", "").split(), LABEL), **refused}


class Shape:
    """An object with these fields; reads those that are honoured.

    :param needed: names of honoured fields that must be there, with spaces between them.
    :param labels: names of fields that change nothing, likewise.
    :param fields: a reader stands for a field that is honoured.
    """

    def __init__(self, needed: str = "", labels: str = "", /, **fields: Reader | Field) -> None:
        self.needed = needed.split()
        self.fields = {name: each if isinstance(each, Field) else Field(each) for name, each in fields.items()}
        self.fields |= dict.fromkeys(labels.split(), LABEL)

    def __call__(self, value: Any, path: str = "") -> dict[str, Any]:
        """What is honoured of ``value``, as it was read, by name.

        :raises ApiError: 400 with the path of a field that is wrong, missing, or neither honoured nor harmless.
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
                instead = f"leave it out, or send {allowed}" if allowed else "leave it out"
                raise refused(before + name, f"is {shown(each)}, which {field.why}; {instead}")
        for name in self.needed:
            if name not in found and (read := self.fields[name].read) is not None:
                read(None, before + name)  # says that it is missing
        return found

    def _unknown(self, name: str, value: Any, before: str) -> None:
        # Comparing takes the square of the length.
        near = difflib.get_close_matches(name, self.fields, n=1, cutoff=0.8) if len(name) <= _LONGEST_NAME else []
        meant = f"did you mean {near[0]!r}?" if near else "leave it out"
        raise refused(before + name[:200], f"is a field that ASTuner does not know; {meant}", code="unknown_field")


_left_out: ContextVar[Counter[str] | None] = ContextVar("left_out", default=None)


def counted(shape: Shape, value: Any) -> tuple[dict[str, Any], Mapping[str, int]]:
    """A whole body as ``shape`` reads it, and how often a field of each name was left out of what was said."""
    names = Counter[str]()
    token = _left_out.set(names)
    try:
        return shape(value), names
    finally:
        _left_out.reset(token)


class Said(Shape):
    """A part of a conversation: what is in no shape says nothing to the model, and is left out."""

    def _unknown(self, name: str, value: Any, before: str) -> None:
        names = _left_out.get()
        if names is not None and value not in ({}, [], ""):
            names[name[:_LONGEST_NAME]] += 1


def _equal(value: Any, other: Any) -> bool:
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def shown(value: Any) -> str:
    """A value for a message, shortened."""
    text = json.dumps(value[:80] if isinstance(value, str) else value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "…"


def wrong(path: str, value: Any, kind: str) -> ApiError:
    """400: the value is not of this kind."""
    what = "missing" if value is None else shown(value)
    return refused(path, f"is {what}; it must be {kind}", code="invalid_type")


# ---- readers ---------------------------------------------------------------------------------------------------------


def anything(value: Any, path: str) -> Any:
    """As it is: for what is read where more is known."""
    return value


def text(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise wrong(path, value, "a text")
    return value


def word(value: Any, path: str) -> str:
    """A text that is not empty."""
    if not isinstance(value, str) or not value:
        raise wrong(path, value, "a text that is not empty")
    return value


def flag(value: Any, path: str) -> bool:
    if not isinstance(value, bool):
        raise wrong(path, value, "true or false")
    return value


def mapping(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong(path, value, "an object")
    return value


def number(low: float, high: float | None = None, *, whole: bool = False) -> Reader:
    """A number within bounds."""
    kinds, name = (int, "a whole number") if whole else ((int, float), "a number")
    bounds = f"at least {low}" + ("" if high is None else f" and at most {high}")

    def read(value: Any, path: str) -> float:
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise wrong(path, value, name)
        if value < low or (high is not None and value > high):
            raise wrong(path, value, bounds)
        return value

    return read


def one_of(*allowed: str) -> Reader:
    """One of these words."""

    def read(value: Any, path: str) -> str:
        if not isinstance(value, str) or value not in allowed:
            raise wrong(path, value, "one of " + ", ".join(allowed))
        return value

    return read


def items(each: Reader) -> Callable[[Any, str], list[Any]]:
    """A list of what ``each`` reads."""

    def read(value: Any, path: str) -> list[Any]:
        if not isinstance(value, list):
            raise wrong(path, value, "a list")
        if len(value) > MOST_ITEMS:
            raise refused(path, f"has {len(value)} items; it may have {MOST_ITEMS}", code="too_many_items")
        return [each(item, f"{path}[{i}]") for i, item in enumerate(value)]

    return read


def text_or(part: Reader, *, may_be_empty: bool = False) -> Callable[[Any, str], str | list[Any]]:
    """What a message says: a text, or a list with at least one part."""
    parts = items(part)

    def read(value: Any, path: str) -> str | list[Any]:
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise wrong(path, value, "a text, or a list of parts")
        if not value and not may_be_empty:
            raise refused(path, "is empty; it must be a text, or a list with at least one part", code="invalid_type")
        return parts(value, path)

    return read


def tagged(readers: Mapping[str, Reader], why: str, *, default: str = "") -> Reader:
    """An object whose ``type`` says how it is read.

    :param why: what a type that is none of these is told.
    :param default: the type of an object that names none; empty: it has to.
    """

    def read(value: Any, path: str) -> Any:
        kind = mapping(value, path).get("type")
        if kind is None and default:
            kind = default
        if not isinstance(kind, str) or kind not in readers:
            raise refused(f"{path}.type", f"is {shown(kind)}; {why}")
        return readers[kind](value, path)

    return read
