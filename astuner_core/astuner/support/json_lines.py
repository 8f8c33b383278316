"""JSON lines that always can be written and always can be read.

A model may write anything, half a surrogate pair included, which UTF-8 cannot hold; and a number may be NaN, which
JSON cannot hold.  The first becomes a JSON escape, the second null: the file stays valid and nothing is lost.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from astuner.contracts.errors import DataError


def append_jsonl(path: Path, row: Mapping[str, Any]) -> None:
    """Append one row; it is in the file when this returns."""
    with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(_line(row))


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a file of rows, replacing what was there."""
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(_line(row) for row in rows)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; a last line cut off by a crash is left out, and so is a file that is not there.

    :raises DataError: a line is no row.
    """
    if not path.is_file():
        return []
    *lines, _ = path.read_bytes().split(b"\n")  # not splitlines, to which U+2028 in a text ends a line, too
    return [_row(path, number, line) for number, line in enumerate(lines, start=1)]


def _row(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise DataError(f"{path}:{number}: not JSON ({e}); remove the line") from None
    if not isinstance(row, dict):
        raise DataError(f"{path}:{number}: {type(row).__name__} where an object is expected; remove the line")
    return row


def _line(row: Mapping[str, Any]) -> str:
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    return json.dumps(finite, ensure_ascii=False, default=str) + "\n"
