"""What both halves of the package need: files that appear whole, and coroutines for code without an event loop."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Coroutine, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from astuner.support.json_lines import write_jsonl

T = TypeVar("T")


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a file of rows as one: it is the old one or the new one, never a half."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    write_jsonl(temporary, rows)
    temporary.replace(path)


def write_json(path: Path, value: Mapping[str, Any], *, indent: int = 2) -> None:
    """As `write_rows`, of one document."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    text = json.dumps(value, indent=indent, ensure_ascii=False) + "\n"
    temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
    temporary.replace(path)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run it to its end, in a thread of its own where this one has an event loop that runs."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1, "astuner-data") as thread:
        return thread.submit(asyncio.run, work).result()
