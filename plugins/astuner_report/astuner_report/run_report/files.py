"""Readers of the small files of a run folder for the report; damaged parts are left out and listed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Row = dict[str, Any]
NONSENSE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Exceptions raised when a damaged file is read."""


def read_json(path: Path, damage: list[str], check: Callable[[Any], object]) -> Any:
    """Return the content of a file; None if it is missing or damaged.

    If ``check`` raises one of `NONSENSE`, the file is added to ``damage``.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        if found is not None:
            check(found)
    except (OSError, *NONSENSE) as e:
        damage.append(f"{path.name} is damaged and was ignored ({type(e).__name__}: {e})")
        return None
    return found


def read_rows(path: Path, damage: list[str], fits: Callable[[Row], object]) -> list[Row]:
    """Return the valid rows of a file.

    A row is damaged if ``fits`` returns false for it or raises one of `NONSENSE`; damaged rows are added to ``damage``.
    """
    rows, bad = [], []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1] if path.is_file() else (), start=1):
        try:
            row = json.loads(line)
            if not (isinstance(row, dict) and fits(row)):
                raise ValueError("not a valid row")
            rows.append(row)
        except NONSENSE as e:
            bad.append(f"{path.name}:{number}: {e}")
    if bad:
        damage.append(f"{path.name} is damaged: {len(bad):,} rows were ignored ({'; '.join(bad[:3])})")
    return rows


def is_measured(row: Row) -> bool:
    """Return whether it is a row of ``metrics.jsonl``."""
    needed = ("val/success_ci_low", "val/success_ci_high", "val/tasks") if row.get("val/success") is not None else ()
    return has(row, step=int) and all(abs(n or 0.0) < 1e300 for n in (*row.values(), *(row[name] for name in needed)))


def has(row: Mapping[str, Any], **kinds: type) -> bool:
    """Return whether a row has values of these types."""
    return all(isinstance(row.get(name), kind) for name, kind in kinds.items())
