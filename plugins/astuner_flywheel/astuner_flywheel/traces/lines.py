"""The lines of a JSON Lines file, one in memory at a time and never more of it than its limit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from astuner.contracts.errors import DataError
from astuner.support import strict_json
from astuner_flywheel.traces.tally import Tally

_BOM = b"\xef\xbb\xbf"


def raw_lines(path: Path, limit: int, tally: Tally) -> Iterator[tuple[str, bytes]]:
    """``path:number`` and the line, without empty ones; a line over ``limit`` bytes is counted and passed over.

    :raises DataError: the file cannot be read, or (on_bad: stop) such a line.
    """
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(limit + 2):
                number += 1
                place = f"{path}:{number}"
                if len(line) == limit + 2 and not line.endswith(b"\n"):
                    rest = line
                    while rest and not rest.endswith(b"\n"):
                        rest = file.readline(1 << 16)
                    tally.unreadable(f"a line longer than {limit:,} bytes (max_line_bytes)", place)
                    continue
                line = line.removeprefix(_BOM) if number == 1 else line
                if line.strip():
                    tally.read["lines"] += 1
                    yield place, line.rstrip(b"\r\n")
    except OSError as e:
        raise DataError(f"cannot read {path.absolute()}: {e.strerror or e}; correct the path or its "
                        "permissions") from e


def objects(path: Path, limit: int, tally: Tally) -> Iterator[tuple[str, dict[str, Any]]]:
    """The same as JSON objects; a line that holds none is counted.

    :raises DataError: as `raw_lines`.
    """
    for place, line in raw_lines(path, limit, tally):
        try:
            found = strict_json.parse(line)
        except ValueError as e:
            tally.unreadable(_without_detail(str(e)) if tally.on_bad == "skip" else str(e), place)
            continue
        yield place, found


def _without_detail(reason: str) -> str:
    """A reason that is counted together with its like."""
    with contextlib.suppress(ValueError):
        reason = reason[: reason.index(" from byte")]
    return f"a line that is no JSON object: {reason.partition(': line')[0]}"
