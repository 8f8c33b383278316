"""Spans and feedback out of an SQLite file: AgentScope Studio's, in all its layouts, or our collector's.

Columns are looked up, not taken for granted.  The file is copied as it is at one moment and the copy is read, so that
reading takes as long as it takes while Studio goes on writing.  Invariant: the file itself is opened read-only, and
locked for no longer than it takes to copy it.
"""

from __future__ import annotations

import itertools
import json
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.parse import quote

from astuner.contracts.errors import DataError
from astuner_flywheel.receiver.store import APPLICATION, VERSION
from astuner_flywheel.traces.feedback import Feedback, Given
from astuner_flywheel.traces.spans import Span
from astuner_flywheel.traces.tally import Tally

MAGIC = b"SQLite format 3\0"
LOCK_TIMEOUT = 15.0
"""Seconds to wait for somebody who has locked the file."""
LONGEST_ATTRIBUTES = 16 << 20
"""Characters of one span's attributes."""
READ = "databases of AgentScope Studio (1.0.x: a span_table with name and attributes) and of `astuner data collect`"

_COLUMNS = {
    "trace": ("traceId", "trace_id"),
    "span": ("spanId", "span_id", "id"),
    "parent": ("parentSpanId", "parent_span_id", "parentId"),
    "name": ("name",),
    "start": ("startTimeUnixNano", "startTime", "start_time"),
    "end": ("endTimeUnixNano", "endTime", "end_time"),
    "attributes": ("attributes",),
    "scope": ("instrumentationName",),
    "version": ("instrumentationVersion",),
    "scope_json": ("scope",),
    "conversation": ("conversationId", "runId", "run_id"),
    "model": ("model",),
    "operation": ("operationName",),
}
"""What is read -> the columns that layouts have it in."""
_OF_PROCESS = {"runId", "run_id"}
_OLDEST_SCOPE = "agentscope.tracing"
_OF_INTEREST = "('chat', 'text_completion', 'generate_content', 'invoke_agent')"


@contextmanager
def snapshot(path: Path, timeout: float = LOCK_TIMEOUT) -> Iterator[sqlite3.Connection]:
    """A private copy of the database as it is now; gone after the block.

    :raises DataError: it is none, is damaged, or stays locked.
    """
    with tempfile.TemporaryDirectory(prefix="astuner-traces-") as folder:  # for this user only
        try:
            with closing(sqlite3.connect(Path(folder) / "copy.sqlite")) as copy:
                uri = f"file:{quote(str(path.absolute()))}?mode=ro"
                with closing(sqlite3.connect(uri, uri=True, timeout=timeout, isolation_level=None)) as source:
                    source.execute("BEGIN")
                    # This waits for whoever holds a lock; copying would wait for ever.
                    source.execute("SELECT count(*) FROM sqlite_master").fetchone()
                    source.backup(copy)
                yield copy
        except sqlite3.Error as e:
            raise DataError(_says(path, e, timeout)) from e


def check_layout(database: sqlite3.Connection, path: Path) -> dict[str, str]:
    """What is read -> its column in this layout.

    :raises DataError: it is a layout that is not known; says what was found.
    """
    tables = [row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]
    if "span_table" not in tables:
        raise DataError(f"{path} has no span_table, but {', '.join(tables[:12]) or 'no table at all'}; read are {READ}")
    application, version = (database.execute(f"PRAGMA {n}").fetchone()[0] for n in ("application_id", "user_version"))
    if application == APPLICATION and version > VERSION:
        raise DataError(
            f"{path} is a collector's file of version {version}, and {VERSION} is read; update astuner-flywheel"
        )
    columns = [row[1] for row in database.execute("PRAGMA table_info(span_table)")]
    found = {what: next((c for c in names if c in columns), "") for what, names in _COLUMNS.items()}
    if missing := [what for what in ("name", "attributes") if not found[what]]:
        raise DataError(
            f"{path} has a span_table without {' and '.join(missing)}; its columns are {', '.join(columns[:40])}. "
            f"Read are {READ}"
        )
    return found


def traces(database: sqlite3.Connection, layout: dict[str, str], path: str, tally: Tally) -> Iterator[list[Span]]:
    """The spans of one trace after the other, each trace whole whatever the order they were written in."""
    attributes = layout["attributes"]
    if layout["operation"]:
        of_interest = f"{layout['operation']} IS NULL OR {layout['operation']} IN {_OF_INTEREST}"
        attributes = f"CASE WHEN {of_interest} THEN {attributes} ELSE '{{}}' END"
    names = [what for what in _COLUMNS if what not in ("attributes", "operation")]
    chosen = ", ".join(f"{layout[what] or 'NULL'} AS {what}" for what in names)
    trace = layout["trace"] or "CAST(rowid AS text)"
    query = f"SELECT {trace} AS trace_of, {attributes} AS attributes, {chosen} FROM span_table ORDER BY trace_of, rowid"
    cursor = database.execute(query)
    fields = [column[0] for column in cursor.description]
    rows = (dict(zip(fields, row, strict=True)) for row in cursor)
    for trace_id, of_trace in itertools.groupby(rows, key=lambda row: str(row["trace_of"])):
        spans: dict[str, Span] = {}
        for row in of_trace:
            tally.read["spans"] += 1
            span = _span(trace_id, row, layout, f"{path}, trace {trace_id}", tally)
            if span is not None and span.span_id in spans:
                tally.drop("a span that is there twice", f"{path}, trace {trace_id}")
            elif span is not None:
                spans[span.span_id] = span
        if spans:
            tally.read["traces"] += 1
            yield list(spans.values())


def feedback(database: sqlite3.Connection, tally: Tally) -> Iterator[Given]:
    """What users said, of a collector's file; nothing in Studio's, which has no place for it."""
    if not database.execute("SELECT 1 FROM sqlite_master WHERE name = 'feedback_table'").fetchone():
        return
    query = "SELECT receivedAt, responseId, traceId, conversationId, rating, correction, comment FROM feedback_table"
    for at, response, trace, conversation, rating, correction, comment in database.execute(f"{query} ORDER BY id"):
        tally.read["feedback"] += 1
        yield Given(
            feedback=Feedback(rating=rating, correction=correction or "", comment=comment or ""),
            response_id=response or "",
            trace_id=trace or "",
            conversation_id=conversation or "",
            time=at or 0.0,
        )


def _span(trace_id: str, row: dict[str, Any], layout: dict[str, str], place: str, tally: Tally) -> Span | None:
    text = row["attributes"]
    if isinstance(text, str) and len(text) > LONGEST_ATTRIBUTES:
        tally.unreadable(f"a span's attributes with more than {LONGEST_ATTRIBUTES:,} characters", place)
        return None
    try:
        attributes = json.loads(text or "{}")
    except (ValueError, TypeError, RecursionError):
        attributes = None
    if not isinstance(attributes, dict):
        tally.unreadable("a span's attributes are no JSON object", place)
        return None
    scope, version = _scope(row)
    if not scope and layout["conversation"] in _OF_PROCESS:
        scope = _OLDEST_SCOPE
    return Span(
        trace_id=trace_id,
        span_id=str(row["span"] or trace_id),
        parent_id=str(row["parent"] or "").strip("0") and str(row["parent"]),
        name=str(row["name"] or "").strip(),
        start=nanoseconds(row["start"]),
        end=nanoseconds(row["end"]),
        attributes=attributes,
        scope=scope,
        scope_version=version,
        conversation_id=str(row["conversation"] or ""),
        model=str(row["model"] or ""),
    )


def _scope(row: dict[str, Any]) -> tuple[str, str]:
    name, version = row["scope"], row["version"]
    if not name and isinstance(row["scope_json"], str):
        try:
            whole = json.loads(row["scope_json"])
        except ValueError:
            whole = None
        if isinstance(whole, dict):
            name, version = whole.get("name"), whole.get("version")
    return str(name or ""), str(version or "")


def nanoseconds(value: Any) -> int:
    """A time in whatever unit a layout has it (told by its size), or as ISO 8601; 0 where there is none."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        try:
            at = datetime.fromisoformat(str(value).replace("Z", "+00:00"))
        except ValueError:
            return 0
        return int((at if at.tzinfo else at.replace(tzinfo=timezone.utc)).timestamp() * 1e9)
    if not 0 < number < 1e20:
        return 0
    for unit, smallest in ((1, 1e17), (10**3, 1e14), (10**6, 1e11)):  # nano-, micro-, milliseconds since 1970
        if number >= smallest:
            return int(value) * unit if isinstance(value, (int, str)) and str(value).isdigit() else int(number * unit)
    return int(number * 1e9)


def _says(path: Path, e: sqlite3.Error, timeout: float) -> str:
    text = str(e)
    if "locked" in text or "busy" in text:
        return f"{path} stayed locked for {timeout:g} s; wait until whoever writes to it is done, or copy the file"
    if "not a database" in text:
        return f"{path} is no SQLite database; read are {READ}"
    if "unable to open" in text:
        return f"cannot open {path} ({text}); where there is a -wal file, its folder must be one you may write to"
    return f"{path} cannot be read ({text}); a damaged file may be saved with: sqlite3 {path.name} .recover"


def is_database(head: Sequence[int] | bytes) -> bool:
    return bytes(head[: len(MAGIC)]) == MAGIC
