"""Where traces come from: a file's first bytes say which of the three kinds it is.

Spans from files go through a collector's database of their own, made for the occasion: that brings together what is out
of order and drops what is there twice, in bounded memory and with the same code.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from astuner.contracts.errors import DataError
from astuner_flywheel.receiver.otlp import NotOtlp, from_json
from astuner_flywheel.receiver.store import Store
from astuner_flywheel.traces import database
from astuner_flywheel.traces.chats import chats
from astuner_flywheel.traces.conversation import Conversation
from astuner_flywheel.traces.feedback import Given
from astuner_flywheel.traces.lines import raw_lines
from astuner_flywheel.traces.replies import conversations
from astuner_flywheel.traces.tally import Tally

DATABASE, SPANS, CHATS = "database", "OTLP JSON", "chats"
_HEAD = 64 << 10
_BATCH = 500


def kind_of(path: Path) -> str:
    """`DATABASE`, `SPANS` or `CHATS`.

    :raises DataError: it is none of them, or cannot be read.
    """
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD)
    except OSError as e:
        raise DataError(f"cannot read {path.absolute()}: {e.strerror or e}; correct the path") from e
    if not head.strip():
        raise DataError(f"{path} is empty")
    if database.is_database(head):
        return DATABASE
    if path.suffix.lower() in (".sqlite", ".sqlite3", ".db"):
        raise DataError(f"{path} is no SQLite database (it begins with {head[:12]!r}); read are {database.READ}")
    if head[:2] == b"\x1f\x8b":
        raise DataError(f"{path} is compressed; unpack it first: gunzip {path.name}")
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if not start.startswith(b"{"):
        raise DataError(
            f"{path} is no source of traces (it begins with {start[:12]!r}); read are SQLite databases of AgentScope "
            "Studio or of `astuner data collect`, OTLP as JSON, and chats, one JSON object a line"
        )
    return SPANS if b'"resourceSpans"' in head or b'"resource_spans"' in head else CHATS


def read_source(path: Path, limit: int, tally: Tally) -> Iterator[Conversation | Given]:
    """The conversations of a file, and the feedback if it holds some.

    :param limit: bytes of a line, in files of lines.
    :raises DataError: the file cannot be read, or (on_bad: stop) something in it.
    """
    kind = kind_of(path)
    if kind == CHATS:
        found: Iterator[Conversation | Given] = chats(path, limit, tally)
    elif kind == DATABASE:
        found = _of_database(path, str(path), tally)
    else:
        found = _of_span_file(path, limit, tally)
    for each in found:
        if isinstance(each, Conversation):
            tally.read["conversations"] += 1
        yield each


def _of_database(path: Path, shown: str, tally: Tally) -> Iterator[Conversation | Given]:
    with database.snapshot(path) as copy:
        layout = database.check_layout(copy, path)
        for spans in database.traces(copy, layout, shown, tally):
            yield from conversations(spans, shown, tally)
        yield from database.feedback(copy, tally)


def _of_span_file(path: Path, limit: int, tally: Tally) -> Iterator[Conversation | Given]:
    with tempfile.TemporaryDirectory(prefix="astuner-spans-") as folder:
        together = Path(folder) / "spans.sqlite"
        store = Store(together)
        try:
            rows = []
            for place, line in raw_lines(path, limit, tally):
                try:
                    decoded = from_json(line)
                except NotOtlp as e:
                    reason = f"a line of OTLP: {e}" if tally.on_bad == "stop" else "a line that is no OTLP request"
                    tally.unreadable(reason, place)
                    continue
                for reason, n in decoded.rejected.items():
                    for _ in range(n):
                        tally.unreadable(reason, place)
                rows += decoded.rows
                if len(rows) >= _BATCH:
                    _add(store, rows, str(path), tally)
                    rows = []
            _add(store, rows, str(path), tally)
        finally:
            store.close()
        yield from _of_database(together, str(path), tally)


def _add(store: Store, rows: list[dict[str, object]], place: str, tally: Tally) -> None:
    for _ in range(len(rows) - store.add_spans(rows)):
        tally.drop("a span that is there twice", place)
