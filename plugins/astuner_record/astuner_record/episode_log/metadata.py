"""Conditions on the metadata of tasks, such as ``layout=two-column``.

A reader keeps the metadata of each group in a temporary table, because the attempts of a group share their task.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from astuner_record.episode_log.store import parsed, storable

FEW_VALUES = 20
"""Most values of a field that is offered as a filter."""
METADATA = """
CREATE TEMP TABLE metadata (
    group_id TEXT NOT NULL, field TEXT NOT NULL, value TEXT NOT NULL, name TEXT NOT NULL, number REAL
);
"""
"""``name`` is the value as in metrics, ``number`` a numeric value."""
_LONGEST = 200
"""Characters of the longest value that can be filtered by."""
_MOST_FIELDS = 200
"""Most fields of a task."""


def fields_of(task: str) -> Sequence[tuple[str, str, str, float | None]]:
    """Return field, value, name and number of each scalar; fields of inner objects are dotted paths.

    :param task: Task of an episode, as JSON.
    """
    found: list[tuple[str, str, str, float | None]] = []
    for path, value in _scalars(parsed(task)["metadata"], ""):
        text = storable(value if isinstance(value, str) else str(value) if type(value) is int else json.dumps(value))
        if len(text) <= _LONGEST and len(found) < _MOST_FIELDS:
            found.append((metric_name(path), text, metric_name(text), _number(text)))
    return found


@lru_cache(maxsize=4096)  # fields have few names, and most have few values
def metric_name(text: str) -> str:
    """Return a field or value as a part of a metric's name."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", text)[:60] or "empty"


def metadata_query(field: str, operator: str, value: str) -> tuple[str, list[str | int | float]]:
    """Return the SQL condition on episodes whose task has such a value.

    :raises ValueError: The value is not a number, but the operator requires one.
    """
    values: list[str | int | float]
    if operator in ("=", "!="):
        sql, values = "? IN (value, name)", [value]
    elif operator == "~":
        sql, values = "instr(lower(value), ?) > 0", [value.lower()]
    elif (number := _number(value)) is None:
        raise ValueError(f"{value!r} is not a number")
    else:
        sql, values = f"number {operator} ?", [number]
    negated = "NOT " if operator == "!=" else ""
    return f"group_id {negated}IN (SELECT group_id FROM temp.metadata WHERE field = ? AND {sql})", [field, *values]


def _scalars(metadata: Any, prefix: str, depth: int = 0) -> Iterator[tuple[str, str | bool | int | float]]:
    if isinstance(metadata, Mapping) and depth < 8:
        for name, value in metadata.items():
            if isinstance(value, (str, bool, int, float)):
                yield f"{prefix}{name}", value
            else:
                yield from _scalars(value, f"{prefix}{name}.", depth + 1)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
