"""Store spans and feedback in SQLite with Studio's ``span_table`` and a ``feedback_table``, and decode OTLP requests.

One process writes (a lock file), any number of processes read (write-ahead log). JSON is converted to OTLP messages
span by span, so that protobuf checks the types. Invariants: data is on disk when `add_spans` and `add_feedback` return;
a duplicate span is stored once, and a span that cannot be stored is counted with a reason and does not affect others.
"""

from __future__ import annotations

import base64
import json
import math
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from astuner import LockTaken, lock_file
from astuner.contracts.errors import DataError, RunError
from astuner_flywheel.traces.conversation import Given
from astuner_flywheel.traces.messages import DEEPEST_NAME, nested
from astuner_http.strict_json import parse_json

Row = dict[str, Any]

LONGEST_ATTRIBUTES = 8 << 20
"""Maximum characters of a span's attributes as JSON."""
TOO_LONG = f"attributes with more than {LONGEST_ATTRIBUTES:,} characters"
_TEXT_KEYS = {"gen_ai.conversation.id"}
"""Attributes that AgentScope sends as JSON text."""


class NotOtlp(ValueError):
    """The body is not an ExportTraceServiceRequest."""


@dataclass
class Decoded:
    """Contents of a request."""

    rows: list[Row] = field(default_factory=list)
    events: list[Row] = field(default_factory=list)
    """Rows of ``event_table``: logs with messages of a span."""
    rejected: Counter[str] = field(default_factory=Counter)
    """Number of rejected spans or logs by reason."""

    @property
    def message(self) -> str:
        return "; ".join(f"{n} × {reason}" for reason, n in self.rejected.most_common(10))


def from_protobuf(raw: bytes, *, logs: bool = False) -> Decoded:
    """Decode a protobuf request.

    :param logs: Whether it is an ExportLogsServiceRequest.
    :raises NotOtlp: The body is not such a request.
    """
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    of: Any = ExportLogsServiceRequest if logs else ExportTraceServiceRequest
    try:
        request = of.FromString(raw)
    except (DecodeError, ValueError) as e:
        raise NotOtlp(f"the body is not {of.__name__}: {e}") from None
    found = Decoded()
    for of_resource in request.resource_logs if logs else request.resource_spans:
        resource = _attributes(of_resource.resource.attributes)
        for of_scope in of_resource.scope_logs if logs else of_resource.scope_spans:
            for each in of_scope.log_records if logs else of_scope.spans:
                _keep_event(found, each) if logs else _keep(found, each, resource, of_scope.scope)
    return found


def from_json(raw: bytes) -> Decoded:
    """Decode a JSON request.

    :raises NotOtlp: The body is not such a request.
    """
    from google.protobuf.json_format import ParseDict, ParseError
    from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
    from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
    from opentelemetry.proto.resource.v1.resource_pb2 import Resource
    from opentelemetry.proto.trace.v1.trace_pb2 import Span

    try:
        body = parse_json(raw, halves=True)
    except ValueError as e:
        raise NotOtlp(f"the body cannot be read as JSON: {e}") from None
    if body and not _either(body, "resourceSpans", "resource_spans", "resourceLogs", "resource_logs"):
        raise NotOtlp(f"the body has no resourceSpans (found: {', '.join(map(str, list(body)[:5]))})")

    def read(given: Mapping[str, Any], into: Any) -> Any:
        try:
            return ParseDict(given, into, ignore_unknown_fields=True)
        except SystemError:  # an error in protobuf
            raise ParseError("a name contains half a character") from None

    found = Decoded()
    try:
        for resource_spans in _lists(body, "resourceSpans", "resource_spans"):
            resource = read(_object(resource_spans, "resource"), Resource())
            for scope_spans in _lists(resource_spans, "scopeSpans", "scope_spans"):
                scope = read(_object(scope_spans, "scope"), InstrumentationScope())
                for each in _lists(scope_spans, "spans", "spans"):
                    try:
                        span = read(_with_base64_ids(each), Span())
                    except RecursionError:
                        found.rejected["nested too deeply"] += 1
                        continue
                    except (ParseError, ValueError) as e:
                        found.rejected[f"an invalid span: {str(e)[:120]}"] += 1
                        continue
                    _keep(found, span, _attributes(resource.attributes), scope)
        for resource_logs in _lists(body, "resourceLogs", "resource_logs"):
            for scope_logs in _lists(resource_logs, "scopeLogs", "scope_logs"):
                for each in _lists(scope_logs, "logRecords", "log_records"):
                    try:
                        _keep_event(found, read(_with_base64_ids(each), LogRecord()))
                    except (ParseError, ValueError, RecursionError) as e:
                        found.rejected[f"an invalid log: {str(e)[:120]}"] += 1
    except (ParseError, UnicodeError) as e:
        raise NotOtlp(f"the body is not ExportTraceServiceRequest: {e}") from None
    return found


def _either(body: Mapping[str, Any], *names: str) -> Any:
    return next((body[name] for name in names if body.get(name)), None)


def _lists(body: Mapping[str, Any], *names: str) -> Iterator[Mapping[str, Any]]:
    items = _either(body, *names) or []
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise NotOtlp(f"{names[0]} is not a list of objects")
    yield from items


def _object(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    if not isinstance(found := body.get(name) or {}, dict):  # protobuf fails for numbers and ignores texts
        raise NotOtlp(f"{name} is not an object")
    return found


def _with_base64_ids(span: Mapping[str, Any]) -> dict[str, Any]:
    """Return a span with base64 IDs. OTLP's JSON uses hexadecimal IDs, unlike protobuf's JSON."""
    found = dict(span)
    if isinstance(found.get("links"), list):
        found["links"] = [_with_base64_ids(link) if isinstance(link, dict) else link for link in found["links"]]
    for name in ("traceId", "trace_id", "spanId", "span_id", "parentSpanId", "parent_span_id"):
        if name in found:
            if not isinstance(found[name], str):
                raise ValueError(f"{name} is not a text")
            found[name] = base64.b64encode(bytes.fromhex(found[name])).decode()
    return found


def _keep(found: Decoded, span: Any, resource: dict[str, Any], scope: Any) -> None:
    try:
        row = _row(span, resource, scope)
    except RecursionError:
        row = "nested too deeply"
    if isinstance(row, str):
        found.rejected[row] += 1
    else:
        found.rows.append(row)


def _keep_event(found: Decoded, record: Any) -> None:
    """Store a log with messages of a span, and reject other logs."""
    attributes = _attributes(record.attributes)
    name = str(record.event_name or attributes.get("event.name"))
    if not name.startswith("gen_ai.") or len(record.trace_id) != 16 or len(record.span_id) != 8:
        found.rejected["a log that is not a GenAI event of a span"] += 1
        return
    event = _json({"name": name, "attributes": nested(attributes), "body": _value(record.body)})
    if len(event) > LONGEST_ATTRIBUTES:
        found.rejected[TOO_LONG] += 1
        return
    time_of = str(record.time_unix_nano or record.observed_time_unix_nano)
    ids = {"traceId": record.trace_id.hex(), "spanId": record.span_id.hex()}
    found.events.append({**ids, "timeUnixNano": time_of, "event": event})


def _row(span: Any, resource: dict[str, Any], scope: Any) -> Row | str:
    """Return the row of a span, or the reason why it cannot be stored."""
    if len(span.trace_id) != 16 or not any(span.trace_id):
        return "a trace id that is not 16 bytes, or all zeros"
    if len(span.span_id) != 8 or not any(span.span_id):
        return "a span id that is not 8 bytes, or all zeros"
    if span.parent_span_id and len(span.parent_span_id) != 8:
        return "a parent's id that is not 8 bytes"
    flat = _attributes(span.attributes)
    if len(attributes := _json(nested(flat))) > LONGEST_ATTRIBUTES:
        return TOO_LONG
    start, end = span.start_time_unix_nano, span.end_time_unix_nano
    usage = {name: _whole(flat.get(f"gen_ai.usage.{name}_tokens")) for name in ("input", "output")}
    trace_id, span_id = span.trace_id.hex(), span.span_id.hex()
    return {
        "id": f"{trace_id}-{span_id}",
        "traceId": trace_id,
        "spanId": span_id,
        "traceState": span.trace_state or None,
        "parentSpanId": span.parent_span_id.hex() if any(span.parent_span_id) else None,
        "flags": span.flags,
        "name": span.name,
        "kind": span.kind,
        "startTimeUnixNano": str(start),
        "endTimeUnixNano": str(end),
        "attributes": attributes,
        "droppedAttributesCount": span.dropped_attributes_count,
        "events": _json([_event(event) for event in span.events]),
        "droppedEventsCount": span.dropped_events_count,
        "links": _json([{"traceId": link.trace_id.hex(), "spanId": link.span_id.hex()} for link in span.links]),
        "droppedLinksCount": span.dropped_links_count,
        "status": _json({"code": span.status.code, "message": span.status.message}),
        "resource": _json({"attributes": nested(resource)}),
        "scope": _json({"name": scope.name, "version": scope.version, "attributes": {}}),
        "statusCode": span.status.code,
        "serviceName": _text(resource.get("service.name")),
        "operationName": _text(flat.get("gen_ai.operation.name")),
        "instrumentationName": scope.name or None,
        "instrumentationVersion": scope.version or None,
        "model": _text(flat.get("gen_ai.request.model")),
        "inputTokens": usage["input"],
        "outputTokens": usage["output"],
        "totalTokens": None if None in usage.values() else sum(filter(None, usage.values())),
        "conversationId": _unquoted(flat.get("gen_ai.conversation.id")),
        "latencyNs": float(max(end - start, 0)),
        "responseId": _text(flat.get("gen_ai.response.id")),
    }


def exported_row(trace_id: str, span_id: str, attributes: Mapping[str, Any], **known: str) -> Row | str:
    """Return the row of an exported span, or why it cannot be stored. ``known`` contains columns by name."""
    if len(text := _json(nested(attributes))) > LONGEST_ATTRIBUTES:
        return TOO_LONG
    ids = {"id": f"{trace_id}-{span_id}", "traceId": trace_id, "spanId": span_id}
    nothing = {"name": "", "kind": 0, "startTimeUnixNano": "", "endTimeUnixNano": "", "status": "{}", "latencyNs": 0.0}
    return {**ids, **nothing, "resource": "{}", "scope": "{}", "attributes": text, **known}


def _attributes(pairs: Any) -> dict[str, Any]:
    found = {pair.key: _value(pair.value) for pair in pairs}
    return {name: _unquoted(value) if name in _TEXT_KEYS else value for name, value in found.items()}


def _value(value: Any, depth: int = 0) -> Any:
    kind = value.WhichOneof("value")
    if kind is None or depth > DEEPEST_NAME:
        return None
    if kind == "array_value":
        return [_value(item, depth + 1) for item in value.array_value.values]
    if kind == "kvlist_value":
        return {pair.key: _value(pair.value, depth + 1) for pair in value.kvlist_value.values}
    if kind == "bytes_value":
        return base64.b64encode(value.bytes_value).decode()
    found = getattr(value, kind)
    return None if isinstance(found, float) and not math.isfinite(found) else found


def _event(event: Any) -> dict[str, Any]:
    attributes = nested(_attributes(event.attributes))
    return {"name": event.name, "timeUnixNano": str(event.time_unix_nano), "attributes": attributes}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"))


def _text(value: Any) -> str | None:
    return None if value is None or isinstance(value, (dict, list)) else str(value)


def _unquoted(value: Any) -> str | None:
    if isinstance(value, str) and value.startswith('"'):
        try:
            value = json.loads(value)
        except ValueError:
            return str(value)
    return _text(value)


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 53 else None


APPLICATION = 0x4153544E
"""SQLite `application_id` of the collector's files."""
VERSION = 1
"""SQLite `user_version` of the collector's files."""
_EVENTS = (
    "CREATE TABLE IF NOT EXISTS event_table (traceId varchar NOT NULL, spanId varchar NOT NULL, timeUnixNano varchar "
    "NOT NULL, event json NOT NULL, UNIQUE (traceId, spanId, timeUnixNano, event))"
)
"""Table of logs with messages of a span. Older files lack it."""


class Store:
    """A collector's file, opened by one process at a time and used by one thread at a time.

    :param path: File, created if it does not exist.
    :raises RunError: Another process writes to it.
    :raises DataError: It belongs to another program, or cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with ExitStack() as opened:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                opened.enter_context(lock_file(path.with_name(f"{path.name}.lock")))
                existed = path.exists() and path.stat().st_size > 0
                os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # users' texts: readable by this user only
                self._database = opened.enter_context(closing(sqlite3.connect(path, check_same_thread=False)))
                self._prepare(existed)
                self.remark = _closed_to_others(path)
                """Remark about the file for users, usually empty."""
            except LockTaken as e:
                told = f"another collector (pid {e.pid}) writes to {path}; stop it, or use another file"
                raise RunError(told) from None
            except (OSError, sqlite3.Error) as e:
                raise DataError(f"cannot write to {path}: {e}; use another file") from None
            self._opened = opened.pop_all()

    def add_spans(self, rows: Sequence[Row], events: Sequence[Row] = ()) -> int:
        """Store spans and return the number of new ones."""
        with self._database:
            told = "INSERT OR IGNORE INTO event_table VALUES (:traceId, :spanId, :timeUnixNano, :event)"
            self._database.executemany(told, events)
            before = self._database.total_changes
            columns = [row[1] for row in self._database.execute("PRAGMA table_info(span_table)")]
            values = ", ".join(f":{name}" for name in columns)
            whole = (dict.fromkeys(columns) | row for row in rows)
            self._database.executemany(f"INSERT OR IGNORE INTO span_table VALUES ({values})", whole)
            return self._database.total_changes - before

    def add_feedback(self, given: Given) -> tuple[int, bool]:
        """Store feedback, and return its number and whether its answer is known."""
        of = {"responseId": given.response_id, "traceId": given.trace_id, "conversationId": given.conversation_id}
        said = given.feedback
        values = [given.time or time.time(), *of.values(), said.rating, said.correction, said.comment]
        with self._database:
            cursor = self._database.execute(
                "INSERT INTO feedback_table (receivedAt, responseId, traceId, conversationId, rating, correction, "
                "comment) VALUES (?, ?, ?, ?, ?, ?, ?)",
                [None if value == "" else value for value in values],
            )
        seen = any(
            self._database.execute(f"SELECT 1 FROM span_table WHERE {column} = ? LIMIT 1", (name,)).fetchone()
            for column, name in of.items()
            if name
        )
        return int(cursor.lastrowid or 0), seen

    def counts(self) -> dict[str, int]:
        tables = {"spans": "span_table", "feedback": "feedback_table"}
        return {k: self._database.execute(f"SELECT count(*) FROM {t}").fetchone()[0] for k, t in tables.items()}

    def close(self) -> None:
        self._opened.close()

    def _prepare(self, existed: bool) -> None:
        self._database.execute("PRAGMA busy_timeout = 10000")
        if existed:
            names = ("application_id", "user_version")
            found = [self._database.execute(f"PRAGMA {name}").fetchone()[0] for name in names]
            if found[0] != APPLICATION:
                raise DataError(
                    f"{self.path} is a database of another program; use a file that does not exist (add AgentScope "
                    "Studio's database as a source instead)"
                )
            if found[1] != VERSION:
                raise DataError(f"{self.path} has version {found[1]}, but this collector writes version {VERSION}")
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = FULL")  # confirmed data survives a power failure
        self._database.execute(_EVENTS)
        if not existed:
            self._database.executescript(Path(__file__).with_name("store.sql").read_text(encoding="utf-8"))


def _closed_to_others(path: Path) -> str:
    """Restrict the file to this user, and return a remark or a warning."""
    said = ""
    for each in (path, path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm")):
        mode = each.stat().st_mode if each.exists() else 0
        if not mode & 0o077:
            continue
        try:
            each.chmod(0o600)
        except OSError as e:
            return f"warning: {each} is readable by others; its owner must change that ({e.strerror or e})"
        if each == path:
            said = f"{path} was readable by others (mode {mode & 0o777:04o}) and is now private (0600)"
    return said
