"""Inside the confined process: read one file, answer with its text or with what is wrong with it.

Runs in a fork that may read this file and Python's own library and do nothing else, so whatever a hostile document
makes a parser do ends here.  Invariant: exactly one message is answered, and what it holds is plain JSON.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from astuner.contracts.errors import AstunerError
from astuner_sandbox.isolation.channel import Channel
from astuner_sandbox.isolation.confine import Confinement, confine

PAGE_BREAK = "\n\n"


class Unreadable(Exception):
    """The file cannot be read; the message is a clause that follows the file's name."""


@dataclass(frozen=True)
class Parsed:
    """What a format's reader found: the text of each page (one for a format without), and what it could not read."""

    pages: tuple[str, ...]
    paged: bool = False
    notes: tuple[str, ...] = ()


def warm() -> None:
    """Import the parsers; every document then shares them."""
    for name in ("bs4", "docx", "docx.table", "pypdf", "astuner_flywheel.documents.html"):
        import_module(name)


def main(channel: Channel, options: Mapping[str, Any]) -> None:
    """Answer ``{"text", "pages", "sha256", "notes"}`` or ``{"fault"}``, with ``{"level"}``, and end the process."""
    try:
        level = confine(Confinement(**options["confinement"]), options["require"])
    except AstunerError as e:
        channel.send({"refused": str(e)})
        return
    try:
        answer = _read(options)
    except Unreadable as e:
        answer = {"fault": str(e)}
    except MemoryError:
        answer = {"fault": f"needs more than {options['memory_mb']} MB of memory to read; max_memory_mb raises that"}
    except RecursionError:
        answer = {"fault": "is nested too deeply to be read"}
    except Exception as e:  # a parser may raise anything at a broken file
        answer = {"fault": f"cannot be read as {options['kind']}: {type(e).__name__}: {str(e)[:300]}"}
    channel.send({**answer, "level": level.as_json()})


def _read(options: Mapping[str, Any]) -> dict[str, Any]:
    with open(options["path"], "rb") as file:
        data = file.read(options["bytes"] + 1)
    if len(data) > options["bytes"]:
        raise Unreadable("grew while it was read; run it again")
    if not data.strip():
        raise Unreadable("is empty")
    parsed = _parser(options["kind"])(data, options)
    text, starts = _join(parsed)
    if not text.strip():
        raise Unreadable("has no text in it")
    if len(text) > options["characters"]:
        raise Unreadable(
            f"has more than {options['characters']:,} characters of text; max_characters raises that, or split the file"
        )
    return {
        "sha256": hashlib.sha256(data).hexdigest(),
        "text": text,
        "pages": starts if parsed.paged else [],
        "notes": list(parsed.notes),
    }


def _join(parsed: Parsed) -> tuple[str, list[int]]:
    """One text, and where each page begins in it."""
    parts, starts, at = [], [], 0
    for page in parsed.pages:
        clean = page.encode("utf-8", "replace").decode("utf-8").replace("\x00", "\ufffd")  # no lone surrogates
        starts.append(at)
        parts.append(clean)
        at += len(clean) + len(PAGE_BREAK)
    return PAGE_BREAK.join(parts), starts


def _parser(kind: str) -> Callable[[bytes, Mapping[str, Any]], Parsed]:
    if kind == "pdf":
        from astuner_flywheel.documents.pdf import parse
    elif kind == "docx":
        from astuner_flywheel.documents.docx import parse
    elif kind == "html":
        from astuner_flywheel.documents.html import parse
    else:
        from astuner_flywheel.documents.plain import parse
    return parse
