"""The collector's file: SQLite with Studio's ``span_table``, and a ``feedback_table``.

One process writes (a lock beside the file), any number reads meanwhile (write-ahead log).  Invariant: what `add_spans`
and `add_feedback` have returned for is on the disk; a span that comes twice is kept once.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from astuner.contracts.errors import DataError, RunError
from astuner.support.locks import Taken, locked

APPLICATION = 0x4153544E
"""SQLite's `application_id` of our files."""
VERSION = 1
"""SQLite's `user_version`."""
SPAN_COLUMNS = {
    "id": "varchar PRIMARY KEY NOT NULL",
    "traceId": "varchar NOT NULL",
    "spanId": "varchar NOT NULL",
    "traceState": "varchar",
    "parentSpanId": "varchar",
    "flags": "integer",
    "name": "varchar NOT NULL",
    "kind": "integer NOT NULL",
    "startTimeUnixNano": "varchar NOT NULL",
    "endTimeUnixNano": "varchar NOT NULL",
    "attributes": "json NOT NULL",
    "droppedAttributesCount": "integer",
    "events": "json",
    "droppedEventsCount": "integer",
    "links": "json",
    "droppedLinksCount": "integer",
    "status": "json NOT NULL",
    "resource": "json NOT NULL",
    "scope": "json NOT NULL",
    "statusCode": "integer",
    "serviceName": "varchar",
    "operationName": "varchar",
    "instrumentationName": "varchar",
    "instrumentationVersion": "varchar",
    "model": "varchar",
    "inputTokens": "integer",
    "outputTokens": "integer",
    "totalTokens": "integer",
    "conversationId": "varchar",
    "latencyNs": "float NOT NULL",
    "responseId": "varchar",
}
"""As Studio 1.0.9 has them, and `responseId`, which feedback is looked up by."""
_SCHEMA = (
    f"CREATE TABLE span_table ({', '.join(f'{name} {kind}' for name, kind in SPAN_COLUMNS.items())})",
    "CREATE TABLE feedback_table (id integer PRIMARY KEY AUTOINCREMENT, receivedAt float NOT NULL, responseId varchar, "
    "traceId varchar, conversationId varchar, rating float, correction text, comment text)",
    "CREATE INDEX span_trace ON span_table (traceId)",
    "CREATE INDEX span_conversation ON span_table (conversationId) WHERE conversationId IS NOT NULL",
    "CREATE INDEX span_response ON span_table (responseId) WHERE responseId IS NOT NULL",
    f"PRAGMA application_id = {APPLICATION}",
    f"PRAGMA user_version = {VERSION}",
)
_INSERT = (
    f"INSERT OR IGNORE INTO span_table ({', '.join(SPAN_COLUMNS)}) "
    f"VALUES ({', '.join(f':{name}' for name in SPAN_COLUMNS)})"
)


class Store:
    """Opened by one process at a time, used by one thread at a time.

    :param path: made if it is not there.
    :raises RunError: another process writes to it.
    :raises DataError: it is another program's, or cannot be had.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with ExitStack() as opened:
            _lock(path, opened)
            try:
                existed = path.exists() and path.stat().st_size > 0
                os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # what users said is for this user only
                self._database = opened.enter_context(closing(sqlite3.connect(path, check_same_thread=False)))
                self._prepare(existed)
                self.remark = _closed_to_others(path)
                """What a person should know about the file; mostly nothing."""
            except (OSError, sqlite3.Error) as e:
                raise DataError(f"cannot write to {path}: {e}; name another file") from None
            self._opened = opened.pop_all()

    def add_spans(self, rows: Sequence[Mapping[str, Any]]) -> int:
        """How many of them were new."""
        with self._database:
            before = self._database.total_changes
            self._database.executemany(_INSERT, rows)
            return self._database.total_changes - before

    def add_feedback(self, row: Mapping[str, Any]) -> tuple[int, bool]:
        """The feedback's number, and whether what it is about was seen already."""
        with self._database:
            cursor = self._database.execute(
                "INSERT INTO feedback_table (receivedAt, responseId, traceId, conversationId, rating, correction, "
                "comment) VALUES (:time, :response_id, :trace_id, :conversation_id, :rating, :correction, :comment)",
                {"time": time.time(), **row},
            )
        columns = {"responseId": "response_id", "traceId": "trace_id", "conversationId": "conversation_id"}
        seen = any(
            self._database.execute(f"SELECT 1 FROM span_table WHERE {column} = ? LIMIT 1", (row[name],)).fetchone()
            for column, name in columns.items()
            if row[name]
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
                    f"{self.path} is a database of another program, and the collector writes to its own only; name a "
                    "file that does not exist (AgentScope Studio's database is read where it is, as a source)"
                )
            if found[1] != VERSION:
                raise DataError(f"{self.path} is a collector's file of version {found[1]}, this one writes {VERSION}")
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = FULL")  # answered means kept, also when the power fails
        if not existed:
            with self._database:
                for statement in _SCHEMA:
                    self._database.execute(statement)


def _lock(path: Path, opened: ExitStack) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        opened.enter_context(locked(path.with_name(f"{path.name}.lock")))
    except Taken as e:
        raise RunError(f"another collector (pid {e.pid}) writes to {path}; stop it, or name another file") from None
    except OSError as e:
        raise DataError(f"cannot write to {path}: {e.strerror or e}; name another file") from None


def _closed_to_others(path: Path) -> str:
    """What is to be said of who may read what users said: made for this user only where that can be, else a warning."""
    said = ""
    for each in (path, path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm")):
        mode = each.stat().st_mode if each.exists() else 0
        if not mode & 0o077:
            continue
        try:
            each.chmod(0o600)
        except OSError as e:
            return f"{each} can be read by others, and stays so, since it is not yours ({e.strerror or e})"
        if each == path:
            said = f"{path} could be read by others (mode {mode & 0o777:04o}); it is for you alone now (0600)"
    return said
