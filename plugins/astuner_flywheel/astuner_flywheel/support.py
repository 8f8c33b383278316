"""Shared helpers: atomic file writes, running coroutines from synchronous code, and progress output."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Coroutine, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from astuner import write_jsonl

T = TypeVar("T")


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a JSON Lines file atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    write_jsonl(temporary, rows)
    temporary.replace(path)


def write_json(path: Path, value: Mapping[str, Any], *, indent: int = 2) -> None:
    """Write a JSON document atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    text = json.dumps(value, indent=indent, ensure_ascii=False) + "\n"
    temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
    temporary.replace(path)


def told(name: str, **values: Any) -> str:
    """Return a text for users from the template ``texts/NAME.j2``."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    texts = Environment(
        loader=PackageLoader("astuner_flywheel", "texts"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    texts.filters["n"] = "{:,}".format
    return texts.get_template(f"{name}.j2").render(values).rstrip("\n")


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to completion, in a separate thread if an event loop is running in this one."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1, "astuner-data") as thread:
        return thread.submit(asyncio.run, work).result()


def cut_torn_end(path: Path) -> None:
    """Remove a last line that a crash truncated, so that the next line starts correctly."""
    if path.exists():
        with path.open("r+b") as file:
            file.truncate(file.read().rfind(b"\n") + 1)


class Live:
    """Show progress on stderr: transient lines at intervals, and permanent lines.

    :param before: Prefix of every line.
    :param every: Minimum seconds between transient lines.
    :param over: Overwrite transient lines, as terminals support.
    """

    def __init__(self, before: str = "", *, every: float, over: bool = False) -> None:
        self._before, self._every, self._over = before, every, over
        self._last, self._open = 0.0, False

    def say(self, text: str) -> None:
        """Show a transient line, if enough time has passed."""
        if time.monotonic() - self._last >= self._every:
            self._last = time.monotonic()
            if self._over:
                self._write(f"\r\x1b[2K{printable(text)[:200]}")
                self._open = True
            else:
                self.tell(text)

    def tell(self, text: str) -> None:
        """Show a permanent line."""
        self.end()
        self._write(f"{self._before}{printable(text)}\n")

    def end(self) -> None:
        """Keep the last transient line and start a new line."""
        if self._open:
            self._write("\n")
            self._open = False

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


def printable(text: str) -> str:
    """Replace unprintable characters, which may occur in names of files and spans and in texts of models."""
    return "".join(char if char.isprintable() else "?" for char in text)
