"""What both halves of the package need: files that appear whole, coroutines for code without a loop, and progress."""

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


def told(name: str, **values: Any) -> str:
    """A text for a person, of the template ``texts/NAME.j2``."""
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
    """Run it to its end, in a thread of its own where this one has an event loop that runs."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1, "astuner-data") as thread:
        return thread.submit(asyncio.run, work).result()


def cut_torn_end(path: Path) -> None:
    """Take off a last line that a crash cut short, so that the next one is not written behind its half."""
    if path.exists():
        with path.open("r+b") as file:
            file.truncate(file.read().rfind(b"\n") + 1)


class Live:
    """Progress on stderr: a line now and then, or one line that is written over, and lines that stay.

    :param before: what every line begins with.
    :param every: seconds between two lines that do not stay.
    :param over: write them over each other, as a terminal can.
    """

    def __init__(self, before: str = "", *, every: float, over: bool = False) -> None:
        self._before, self._every, self._over = before, every, over
        self._last, self._open = 0.0, False

    def say(self, text: str) -> None:
        """What may be missed."""
        if time.monotonic() - self._last >= self._every:
            self._last = time.monotonic()
            if self._over:
                self._write(f"\r\x1b[2K{printable(text)[:200]}")
                self._open = True
            else:
                self.tell(text)

    def tell(self, text: str) -> None:
        """What has to stay."""
        self.end()
        self._write(f"{self._before}{printable(text)}\n")

    def end(self) -> None:
        """Leave the last line standing."""
        if self._open:
            self._write("\n")
            self._open = False

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


def printable(text: str) -> str:
    """A file's name may have anything in it, and so may what a model said or a span is called."""
    return "".join(char if char.isprintable() else "?" for char in text)
