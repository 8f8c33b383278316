"""Read and write JSON Lines files.

Invariant: written files are always valid. A model's text may contain lone surrogates, which UTF-8 cannot encode; they
become JSON escapes. NaN and infinity, which JSON cannot represent, become null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from astuner.contracts.errors import DataError


def append_jsonl(path: Path, row: Mapping[str, Any]) -> None:
    """Append one row and flush it to the file."""
    with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(_line(row))


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows to a file and replace its contents."""
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(_line(row) for row in rows)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file, without an incomplete last line. A missing file has no rows.

    :raises DataError: A line is not a JSON object.
    """
    if not path.is_file():
        return []
    *lines, _ = path.read_bytes().split(b"\n")  # not splitlines, which also splits at U+2028 inside a string
    return [_row(path, number, line) for number, line in enumerate(lines, start=1)]


def _row(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise DataError(f"{path}:{number}: not JSON ({e}); remove the line") from None
    if not isinstance(row, dict):
        raise DataError(f"{path}:{number}: expected a JSON object, got {type(row).__name__}; remove the line")
    return row


def _line(row: Mapping[str, Any]) -> str:
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    return json.dumps(finite, ensure_ascii=False, default=str) + "\n"
