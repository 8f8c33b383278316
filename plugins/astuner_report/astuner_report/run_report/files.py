"""The small files of a run folder, for its report: what of them is not as a run writes it is left out, and named."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Row = dict[str, Any]
NONSENSE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What comes of looking into a file that is not as it was written."""


def read_json(path: Path, damage: list[str], check: Callable[[Any], object]) -> Any:
    """What a file holds; None where there is none, or ``check`` raises one of `NONSENSE`, which goes to ``damage``."""
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        if found is not None:
            check(found)
    except (OSError, *NONSENSE) as e:
        damage.append(f"{path.name} is damaged, and left out: {type(e).__name__}: {e}")
        return None
    return found


def read_rows(path: Path, damage: list[str], fits: Callable[[Row], object]) -> list[Row]:
    """The rows of a file that ``fits`` takes; where it raises one of `NONSENSE`, or is false, it does not."""
    rows, bad = [], []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1] if path.is_file() else (), start=1):
        try:
            row = json.loads(line)
            if not (isinstance(row, dict) and fits(row)):
                raise ValueError("no row that a run writes")
            rows.append(row)
        except NONSENSE as e:
            bad.append(f"{path.name}:{number}: {e}")
    if bad:
        damage.append(f"{path.name} is damaged: {len(bad):,} rows are left out: {'; '.join(bad[:3])}")
    return rows


def is_measured(row: Row) -> bool:
    """Whether it is a row of ``metrics.jsonl``."""
    needed = ("val/success_ci_low", "val/success_ci_high", "val/tasks") if row.get("val/success") is not None else ()
    return has(row, step=int) and all(abs(n or 0.0) < 1e300 for n in (*row.values(), *(row[name] for name in needed)))


def has(row: Mapping[str, Any], **kinds: type) -> bool:
    """Whether a row has values of these types."""
    return all(isinstance(row.get(name), kind) for name, kind in kinds.items())
