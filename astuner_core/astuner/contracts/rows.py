"""From a row of a data set to a task; the same rules for every reader.

A row is one JSON object.  The query is the field that was named, else the first of the usual names the row has.
Metadata is the whole row, and where the row has a ``metadata`` object of its own, that object's fields too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any

from astuner.contracts.types import Task

QUERY_FIELDS = ("main_query", "question", "problem", "query", "prompt")
"""Where the query is looked for, in this order, when the config names no field."""
ID_FIELDS = ("task_id", "id")
"""Likewise for the task's label."""
_MAX_DEPTH = 64


class BadRow(ValueError):
    """A row that is no task; the message says why, the reader adds where."""


@dataclass(frozen=True)
class FieldMap:
    """Which fields of a row are the query and the id; None looks for the usual names."""

    query_field: str | None = None
    id_field: str | None = None

    def task(self, row: object, default_id: str) -> Task:
        """The task in ``row``.

        :param default_id: the label of a row that has none.
        :raises BadRow: not an object, no query, or fields of the wrong type.
        """
        if not isinstance(row, Mapping):
            raise BadRow(f"a task is a JSON object, this is {_kind(row)}")
        messages = _messages(row)
        return Task(
            task_id=self._id(row, default_id),
            main_query=self._query(row, needed=not messages),
            init_messages=messages,
            env_type=_text(row, "env_type"),
            metadata=_metadata(row),
        )

    def _query(self, row: Mapping[str, Any], needed: bool) -> str:
        candidates = [self.query_field] if self.query_field else QUERY_FIELDS
        name = next((c for c in candidates if row.get(c) is not None), None)
        if name is None:
            if not needed:
                return ""
            has = ", ".join(map(str, row)) or "none"
            names = repr(self.query_field) if self.query_field else " or ".join(QUERY_FIELDS)
            raise BadRow(f"it has no field {names} (its fields: {has}); name the right one with query_field")
        query = row[name]
        if not isinstance(query, str):
            raise BadRow(f"field {name!r} holds {_kind(query)}; a query is text")
        if not query.strip() and needed:
            raise BadRow(f"field {name!r} is empty")
        return query

    def _id(self, row: Mapping[str, Any], default_id: str) -> str:
        candidates = [self.id_field] if self.id_field else ID_FIELDS
        value = next((row[c] for c in candidates if row.get(c) not in (None, "")), None)
        if value is None:
            if self.id_field:
                raise BadRow(f"it has no field {self.id_field!r}; correct id_field, or leave it out")
            return default_id
        if isinstance(value, bool) or not isinstance(value, (str, int)):
            raise BadRow(f"its id is {_kind(value)}; an id is text or a whole number")
        return str(value)


def parse_json(text: bytes) -> Any:
    """Return the value of a JSON text in UTF-8.

    :raises BadRow: it is not JSON, or holds a value that no task may hold (NaN, half a surrogate pair).
    """
    try:
        value = json.loads(text.decode("utf-8"), parse_constant=_number, parse_float=_number)
        if b"\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # raises at half a surrogate pair, which no tokenizer takes
        return value
    except UnicodeDecodeError as e:
        raise BadRow(f"byte {e.start + 1} of the line ({text[e.start]:#04x}) is not UTF-8") from None
    except json.JSONDecodeError as e:
        line = f"line {e.lineno}, " if e.lineno > 1 else ""
        raise BadRow(f"not JSON at {line}column {e.colno}: {e.msg}") from None
    except RecursionError:
        raise BadRow("its JSON is nested too deeply") from None
    except ValueError as e:  # a number with more digits than Python converts
        raise BadRow(f"not JSON that can be read: {e}") from None


def _number(text: str) -> float:
    if math.isfinite(number := float(text)):
        return number
    raise BadRow(f"{text[:40]} is not JSON, or too large a number; write null or a number")


def _messages(row: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    messages = row.get("init_messages")
    if messages is None:
        return ()
    if not isinstance(messages, list) or not all(isinstance(m, Mapping) and _text(m, "role") for m in messages):
        raise BadRow("init_messages is not a list of messages with a role")
    return tuple(messages)


def _text(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise BadRow(f"field {name!r} holds {_kind(value)}; it must be text")
    return value


def _metadata(row: Mapping[str, Any]) -> dict[str, Any]:
    inner = row.get("metadata")
    merged = dict(row)
    if isinstance(inner, Mapping):
        merged = {name: value for name, value in row.items() if name != "metadata"} | dict(inner)
    return {str(name): _plain(value, str(name)) for name, value in merged.items()}


def _plain(value: Any, name: str, depth: int = 0) -> Any:
    """The value as JSON can hold it: Parquet also has dates and decimals, which become text."""
    if depth > _MAX_DEPTH:
        raise BadRow(f"field {name[:80]!r} is nested more than {_MAX_DEPTH} levels deep")
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, (datetime, date, time, Decimal)):
        return str(value)
    if isinstance(value, Mapping):
        return {str(k): _plain(v, name, depth + 1) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v, name, depth + 1) for v in value]
    raise BadRow(f"field {name!r} holds {_kind(value)}, which is not JSON; remove that column")


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null", int: "a number"}
    return names.get(type(value), "a number" if isinstance(value, float) else f"a {type(value).__name__}")
