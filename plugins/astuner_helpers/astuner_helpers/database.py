"""The database of this machine's helper models, and the answers in it: ``$ASTUNER_HOME/helper_models/calls.sqlite``.

All processes of a person share it, so it is where limits and budgets are counted; it holds answers and records, and
never a key.  Invariant: whoever reads and then writes does so in one transaction, which no other process gets between.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import functools
import json
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from astuner.contracts.errors import ConfigError
from astuner.support.processes import home
from astuner_helpers.reply import Reply, count_of

logger = logging.getLogger("astuner.helper_models")

VERSION = 1
BUSY_SECONDS = 60.0
"""How long another process may hold the database before that is an error."""
MOST_BYTES = 1 << 30
"""What all answers may take together."""
_LOOK_EVERY = 64
_AFTER_EVICTION = 0.9
_PER_QUERY = 500
_VECTOR, _TEXT = b"v", b"t"

_SCHEMA = """
CREATE TABLE calls (
    id INTEGER PRIMARY KEY,
    time REAL NOT NULL,             -- when it was sent, in seconds since 1970
    scope TEXT NOT NULL,            -- what budgets are counted for: a run folder, a command's output folder
    name TEXT NOT NULL,             -- the helper model's, in its config
    server TEXT NOT NULL,
    model TEXT NOT NULL,
    purpose TEXT NOT NULL,
    key TEXT NOT NULL,              -- of the question, as in answers
    state TEXT NOT NULL,            -- sent, answered, failed, lost (its process ended meanwhile), cached
    process TEXT NOT NULL,          -- pid and start time
    prompt_tokens INTEGER NOT NULL, -- while it is sent, and where the server says nothing: an estimate
    completion_tokens INTEGER NOT NULL,
    estimated INTEGER NOT NULL,     -- whether the tokens are an estimate
    cost REAL NOT NULL,
    seconds REAL,
    error TEXT
);
CREATE INDEX calls_of_a_model ON calls (server, model, time) WHERE state <> 'cached';
CREATE INDEX calls_under_way ON calls (scope, name) WHERE state = 'sent';
CREATE INDEX calls_of_a_scope ON calls (scope, name, id);
CREATE TABLE totals (
    scope TEXT NOT NULL,
    name TEXT NOT NULL,
    calls INTEGER NOT NULL DEFAULT 0,
    cached INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0,
    estimated INTEGER NOT NULL DEFAULT 0,
    prompt_tokens INTEGER NOT NULL DEFAULT 0,
    completion_tokens INTEGER NOT NULL DEFAULT 0,
    cost REAL NOT NULL DEFAULT 0,
    PRIMARY KEY (scope, name)
) WITHOUT ROWID;
CREATE TABLE answers (
    key TEXT PRIMARY KEY,
    time REAL NOT NULL,
    size INTEGER NOT NULL,
    value BLOB NOT NULL
);
CREATE INDEX answers_by_age ON answers (time, size);
"""


class Database:
    """One file; used by all threads of a process, one at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._process = 0
        self._inherited: list[sqlite3.Connection] = []  # a parent's: closing them here would undo its locks

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """For single statements.

        :raises ConfigError: the database cannot be used; says why, and what to type.
        """
        if self._process not in (0, os.getpid()):  # a fork: somebody may have held its parent's
            self._lock = threading.RLock()
        with self._lock, self._explained():
            yield self._open()

    @contextlib.contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction, kept where the block ends well; raises as `reading`."""
        with self.reading() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    def close(self) -> None:
        """Close the file; it is opened again when it is needed."""
        with self._lock:
            if self._connection is not None and self._process == os.getpid():
                self._connection.close()
            self._connection = None

    def _open(self) -> sqlite3.Connection:
        if self._connection is not None and self._process == os.getpid():
            return self._connection
        if self._connection is not None:
            self._inherited.append(self._connection)
        folder = self.path.parent
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if folder.stat().st_uid != os.getuid():
                raise ConfigError(f"{folder} belongs to another user; set ASTUNER_HOME to a folder of your own")
            folder.chmod(0o700)
        except OSError as e:
            raise ConfigError(f"cannot use {folder} for the helper models' answers: {e}; set ASTUNER_HOME") from e
        # isolation_level None: transactions are begun where this module says so
        connection = sqlite3.connect(self.path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=NORMAL")  # a crash of the machine may lose the last calls, not more
            self._make(connection)
        except BaseException:
            connection.close()
            raise
        self._connection, self._process = connection, os.getpid()
        return connection

    def _make(self, connection: sqlite3.Connection) -> None:
        if self._version(connection) == VERSION:
            return
        connection.execute("BEGIN IMMEDIATE")  # another process may be at it
        if (version := self._version(connection)) == 0:
            for statement in _SCHEMA.split(";\n"):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {VERSION}")
        connection.execute("COMMIT")
        if version not in (0, VERSION):
            raise ConfigError(
                f"{self.path} was written by an ASTuner whose format is {version}, and this one knows {VERSION}; move "
                f"it away (answers are asked anew, budgets count from 0): mv {self.path} {self.path}.old"
            )

    @staticmethod
    def _version(connection: sqlite3.Connection) -> int:
        return int(connection.execute("PRAGMA user_version").fetchone()[0])

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as e:
            raise ConfigError(f"the helper models' database {self.path} {_told(e, self.path)}") from e


def _told(error: sqlite3.DatabaseError, path: Path) -> str:
    """What is wrong with the database, and what to type; reads on after its path."""
    text = str(error)
    if "locked" in text or "busy" in text:
        return (
            f"was held by another process for {BUSY_SECONDS:g} s; see which one: fuser {path} — end it, or use another "
            "folder: export ASTUNER_HOME=…"
        )
    if isinstance(error, sqlite3.OperationalError) and "malformed" not in text:
        return f"cannot be used: {text}; look at the disk: df {path.parent} — or use another: export ASTUNER_HOME=…"
    return (
        f"is damaged: {text}; move it away (answers are asked anew, budgets count from 0), with its companions: "
        f"for f in {path}*; do mv $f $f.damaged; done"
    )


def database() -> Database:
    """This machine's, of the ``ASTUNER_HOME`` as it is now."""
    return _at(home() / "helper_models" / "calls.sqlite")


@functools.cache
def _at(path: Path) -> Database:
    found = Database(path)
    atexit.register(_close, found.close)
    return found


def _close(close: Callable[[], Any]) -> None:
    close()


class Answers:
    """The answers kept in a database, each under the key of its question.

    Invariant: what comes out is what a server said to exactly this question, or nothing; the answers kept are bounded
    in size, and the oldest go first.
    """

    def __init__(self, database: Database, *, most_bytes: int = MOST_BYTES) -> None:
        self._database, self._most_bytes = database, most_bytes
        self._put = 0

    def get(self, keys: Sequence[str]) -> dict[str, Reply]:
        """What is kept under ``keys``; one that cannot be read is left out, and said."""
        found: dict[str, Reply] = {}
        for at in range(0, len(keys), _PER_QUERY):
            some = keys[at : at + _PER_QUERY]
            marks = ", ".join("?" * len(some))
            with self._database.reading() as db:
                rows = db.execute(f"SELECT key, value FROM answers WHERE key IN ({marks})", some).fetchall()
            for key, value in rows:
                try:
                    found[key] = _unpacked(value)
                except (ValueError, KeyError, TypeError) as e:
                    self.unreadable(key, str(e))
        return found

    def put(self, replies: Mapping[str, Reply]) -> None:
        """Keep replies under their keys."""
        now = time.time()
        rows = [(key, now, value) for key, reply in replies.items() if len(value := _packed(reply)) <= self._most_bytes]
        with self._database.writing() as db:
            db.executemany(
                "INSERT OR REPLACE INTO answers (key, time, size, value) VALUES (?, ?, ?, ?)",
                [(key, then, len(value), value) for key, then, value in rows],
            )
        if self._put % _LOOK_EVERY == 0:
            self.evict()
        self._put += 1

    def unreadable(self, key: str, why: str) -> None:
        """Forget an answer, and say so: it is asked again."""
        logger.warning(
            "the answer kept under %s… in %s cannot be read (%s); it is asked again", key[:12], self._database.path, why
        )
        with self._database.writing() as db:
            db.execute("DELETE FROM answers WHERE key = ?", (key,))

    def evict(self) -> int:
        """Forget the oldest answers where they take more than they may; how many went."""
        with self._database.writing() as db:
            total = int(db.execute("SELECT COALESCE(SUM(size), 0) FROM answers").fetchone()[0])
            if total <= self._most_bytes:
                return 0
            old = []
            for key, size in db.execute("SELECT key, size FROM answers ORDER BY time, rowid"):
                if total <= self._most_bytes * _AFTER_EVICTION:
                    break
                old.append((key,))
                total -= size
            db.executemany("DELETE FROM answers WHERE key = ?", old)
            return len(old)


def _packed(reply: Reply) -> bytes:
    if reply.vectors:
        return _VECTOR + array.array("d", reply.vectors[0]).tobytes()
    kept = {
        "text": reply.text,
        "finish_reason": reply.finish_reason,
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
    }
    return _TEXT + json.dumps(kept).encode()


def _unpacked(value: bytes) -> Reply:
    """:raises ValueError, KeyError, TypeError: it is none that was packed."""
    kind, rest = value[:1], value[1:]
    if kind == _VECTOR:
        vector = array.array("d")
        vector.frombytes(rest)
        return Reply(vectors=(tuple(vector),))
    if kind != _TEXT:
        raise ValueError(f"it is of no known kind: {kind!r}")
    kept = json.loads(rest)
    text, finish_reason = kept["text"], kept["finish_reason"]
    if not isinstance(text, str) or not isinstance(finish_reason, str):
        raise TypeError("its text is none")
    return Reply(
        text=text,
        finish_reason=finish_reason,
        prompt_tokens=count_of(kept["prompt_tokens"]),
        completion_tokens=count_of(kept["completion_tokens"]),
    )
