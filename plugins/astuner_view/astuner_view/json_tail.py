"""A growing file of JSON lines, read from where the last reader stopped.

A cursor says which file was read up to where, and what stood before that place, so that a file that was written anew
(the run was resumed from an earlier step) is noticed, and read from its beginning.
"""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

_LOOKED_AT = 256
"""Bytes before the place that are compared."""


@dataclass(frozen=True, kw_only=True)
class Tail:
    """What was found."""

    rows: list[dict[str, Any]]
    cursor: str
    """To go on from."""
    reset: bool
    """Whether ``rows`` are all there are, not those since the cursor."""
    bad: int = 0
    """Lines that are no JSON object, which were skipped."""


def read_since(path: Path, cursor: str = "") -> Tail:
    """The whole lines of a file after ``cursor``; all of them where that fits no longer, none where there is no file.

    :raises OSError: the file cannot be read.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return Tail(rows=[], cursor="", reset=True)
    with file:
        start = _start(file, cursor)
        file.seek(start or 0)
        data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        end = (start or 0) + len(whole)
        rows, bad = _rows(whole)
        return Tail(rows=rows, cursor=_cursor(file, end), reset=start is None, bad=bad)


def _rows(data: bytes) -> tuple[list[dict[str, Any]], int]:
    rows, bad = [], 0
    for line in data.splitlines():
        try:
            row = json.loads(line)
        except ValueError:  # no JSON, or no UTF-8
            row = None
        if isinstance(row, dict):
            rows.append(row)
        else:
            bad += 1
    return rows, bad


def _start(file: BinaryIO, cursor: str) -> int | None:
    """Where to go on; None where the cursor is of another file, or of none."""
    end = cursor.split("-")[1] if cursor.count("-") == 2 else ""
    if not (end.isdecimal() and end.isascii()) or len(end) > 18:
        return None
    return int(end) if _cursor(file, int(end)) == cursor else None


def _cursor(file: BinaryIO, end: int) -> str:
    about = os.fstat(file.fileno())
    if about.st_size < end:
        return ""
    start = max(0, end - _LOOKED_AT)
    file.seek(start)
    return f"{about.st_ino:x}-{end}-{zlib.crc32(file.read(end - start)):x}"
