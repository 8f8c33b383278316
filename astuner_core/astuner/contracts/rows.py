"""Convert a row of a data set to a task, with the same rules for all task readers.

A row is a JSON object. The query is the configured field, or the first field with one of the usual names. The metadata
contains the complete row and the fields of its ``metadata`` object, if it has one.
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
"""Fields to search for the query, in this order, if the config names none."""
ID_FIELDS = ("task_id", "id")
"""Fields to search for the task's label, in this order, if the config names none."""
_MAX_DEPTH = 64


class BadRow(ValueError):
    """A row that is not a task. The message describes the problem; the reader adds the place."""


@dataclass(frozen=True)
class FieldMap:
    """Names of the query and ID fields; None searches for the usual names."""

    query_field: str | None = None
    id_field: str | None = None

    def task(self, row: object, default_id: str) -> Task:
        """Return the task in ``row``.

        :param default_id: Label for a row without one.
        :raises BadRow: The row is not an object, has no query, or has fields of the wrong type.
        """
        if not isinstance(row, Mapping):
            raise BadRow(f"a task must be a JSON object, but this is {_kind(row)}")
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
            raise BadRow(f"field {names} is missing (fields: {has}); name the query's field with query_field")
        query = row[name]
        if not isinstance(query, str):
            raise BadRow(f"field {name!r} is {_kind(query)}; a query must be text")
        if not query.strip() and needed:
            raise BadRow(f"field {name!r} is empty")
        return query

    def _id(self, row: Mapping[str, Any], default_id: str) -> str:
        candidates = [self.id_field] if self.id_field else ID_FIELDS
        value = next((row[c] for c in candidates if row.get(c) not in (None, "")), None)
        if value is None:
            if self.id_field:
                raise BadRow(f"field {self.id_field!r} is missing; correct or remove id_field")
            return default_id
        if isinstance(value, bool) or not isinstance(value, (str, int)):
            raise BadRow(f"the id is {_kind(value)}; an id must be text or an integer")
        return str(value)


def parse_json(text: bytes) -> Any:
    """Return the value of a JSON text in UTF-8.

    :raises BadRow: The text is not JSON, or contains a value that tasks must not contain (NaN, a lone surrogate).
    """
    try:
        value = json.loads(text.decode("utf-8"), parse_constant=_number, parse_float=_number)
        if b"\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # raises for lone surrogates, which tokenizers reject
        return value
    except UnicodeDecodeError as e:
        raise BadRow(f"byte {e.start + 1} of the line ({text[e.start]:#04x}) is not UTF-8") from None
    except json.JSONDecodeError as e:
        line = f"line {e.lineno}, " if e.lineno > 1 else ""
        raise BadRow(f"not JSON at {line}column {e.colno}: {e.msg}") from None
    except RecursionError:
        raise BadRow("the JSON is nested too deeply") from None
    except ValueError as e:  # a number with more digits than Python converts
        raise BadRow(f"the JSON cannot be read: {e}") from None


def _number(text: str) -> float:
    if math.isfinite(number := float(text)):
        return number
    raise BadRow(f"{text[:40]} is not valid JSON or too large; write null or a smaller number")


def _messages(row: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    messages = row.get("init_messages")
    if messages is None:
        return ()
    if not isinstance(messages, list) or not all(isinstance(m, Mapping) and _text(m, "role") for m in messages):
        raise BadRow("init_messages must be a list of messages that have a role")
    return tuple(messages)


def _text(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise BadRow(f"field {name!r} is {_kind(value)}; it must be text")
    return value


def _metadata(row: Mapping[str, Any]) -> dict[str, Any]:
    inner = row.get("metadata")
    merged = dict(row)
    if isinstance(inner, Mapping):
        merged = {name: value for name, value in row.items() if name != "metadata"} | dict(inner)
    return {str(name): _plain(value, str(name)) for name, value in merged.items()}


def _plain(value: Any, name: str, depth: int = 0) -> Any:
    """Return the value as JSON types. Dates and decimals, as in Parquet, become text."""
    if depth > _MAX_DEPTH:
        raise BadRow(f"field {name[:80]!r} has more than {_MAX_DEPTH} nested levels")
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, (datetime, date, time, Decimal)):
        return str(value)
    if isinstance(value, Mapping):
        return {str(k): _plain(v, name, depth + 1) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v, name, depth + 1) for v in value]
    raise BadRow(f"field {name!r} is {_kind(value)}, which JSON cannot represent; remove that column")


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null", int: "a number"}
    return names.get(type(value), "a number" if isinstance(value, float) else f"a {type(value).__name__}")
