"""Database of the helper models of this machine and their cached answers: ``$ASTUNER_HOME/helper_models/calls.sqlite``.

All processes of a user share it, so limits and budgets are counted here. It contains answers and records, never a key.

The ledger decides whether a request may be sent, and records its usage. A request is entered with its maximum usage
before it is sent, and settled with its actual usage; so requests in progress count towards limits and budgets in every
process. Invariants: a read followed by a write happens in one transaction; the totals of a scope plus the maximum usage
of its requests in progress exceed the budget by at most what one request used beyond its estimate.
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from astuner import astuner_home, is_same_process, process_start_time
from astuner.contracts.errors import ConfigError
from astuner_helpers.reply import Question, Reply, Usage, count_of
from astuner_helpers.settings import HelperModel

logger = logging.getLogger("astuner.helper_models")

VERSION = 1
BUSY_SECONDS = 60.0
"""Seconds to wait for another process that holds the database."""
MOST_BYTES = 1 << 30
"""Maximum size of all cached answers."""
_LOOK_EVERY = 64
_AFTER_EVICTION = 0.9
_PER_QUERY = 500
_VECTOR, _TEXT = b"v", b"t"


class Database:
    """A database file, used by all threads of a process, one at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._process = 0
        self._inherited: list[sqlite3.Connection] = []  # of a parent process: closing them would release its locks

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Open the database for single statements.

        :raises ConfigError: The database cannot be used. The message has the reason and a command that fixes it.
        """
        if self._process not in (0, os.getpid()):  # after a fork: the parent's lock may be held
            self._lock = threading.RLock()
        with self._lock, self._explained():
            yield self._open()

    @contextlib.contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Open a transaction, committed if the block succeeds. Raises the same errors as `reading`."""
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
        """Close the file. It is reopened on the next use."""
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
                raise ConfigError(f"{folder} belongs to another user; set ASTUNER_HOME to a folder that you own")
            folder.chmod(0o700)
        except OSError as e:
            raise ConfigError(f"cannot use {folder} for cached answers of helper models: {e}; set ASTUNER_HOME") from e
        # isolation_level None: this module begins transactions explicitly
        connection = sqlite3.connect(self.path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=NORMAL")  # a machine crash may lose the last calls only
            self._make(connection)
        except BaseException:
            connection.close()
            raise
        self._connection, self._process = connection, os.getpid()
        return connection

    def _make(self, connection: sqlite3.Connection) -> None:
        if self._version(connection) == VERSION:
            return
        connection.execute("BEGIN IMMEDIATE")  # another process may create the tables
        if (version := self._version(connection)) == 0:
            for statement in Path(__file__).with_name("calls.sql").read_text(encoding="utf-8").split(";\n"):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {VERSION}")
        connection.execute("COMMIT")
        if version not in (0, VERSION):
            raise ConfigError(
                f"{self.path} has format {version}, but this version of ASTuner requires format {VERSION}; move the "
                f"file away (cached answers are lost, budgets restart at 0): mv {self.path} {self.path}.old"
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
    """Return a description of a database error and a command that fixes it. The text follows the database's path."""
    text = str(error)
    if "locked" in text or "busy" in text:
        return (
            f"was locked by another process for {BUSY_SECONDS:g} s; end it (find it with: fuser {path}) or use another "
            "folder: export ASTUNER_HOME=…"
        )
    if isinstance(error, sqlite3.OperationalError) and "malformed" not in text:
        return f"cannot be used: {text}; check the disk: df {path.parent} — or use another: export ASTUNER_HOME=…"
    return (
        f"is damaged: {text}; move it and its companion files away (cached answers are lost, budgets restart at 0): "
        f"for f in {path}*; do mv $f $f.damaged; done"
    )


def database() -> Database:
    """Return the database of the current ``ASTUNER_HOME``."""
    return _at(astuner_home() / "helper_models" / "calls.sqlite")


@functools.cache
def _at(path: Path) -> Database:
    found = Database(path)
    atexit.register(found.close)
    return found


class Answers:
    """Cached answers in a database, stored under the keys of their questions.

    Invariant: a returned answer is the server's answer to exactly this question. The total size is bounded; the oldest
    answers are removed first.
    """

    def __init__(self, database: Database, *, most_bytes: int = MOST_BYTES) -> None:
        self._database, self._most_bytes = database, most_bytes
        self._put = 0

    def get(self, keys: Sequence[str]) -> dict[str, Reply]:
        """Return the answers stored under ``keys``. Unreadable answers are left out and logged."""
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
        """Store replies under their keys."""
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
        """Delete an unreadable answer and log a warning. The question is sent again."""
        logger.warning(
            "cannot read cached answer %s… in %s (%s); the question is sent again", key[:12], self._database.path, why
        )
        with self._database.writing() as db:
            db.execute("DELETE FROM answers WHERE key = ?", (key,))

    def evict(self) -> int:
        """Remove the oldest answers if the size limit is exceeded, and return their number."""
        with self._database.writing() as db:
            total = int(db.execute("SELECT COALESCE(SUM(size), 0) FROM answers").fetchone()[0])
            if total <= self._most_bytes:
                return 0
            newest = "SELECT key, SUM(size) OVER (ORDER BY time DESC, rowid DESC) AS with_newer FROM answers"
            delete = f"DELETE FROM answers WHERE key IN (SELECT key FROM ({newest}) WHERE with_newer > ?)"
            return db.execute(delete, (self._most_bytes * _AFTER_EVICTION,)).rowcount


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
    """Unpack a stored reply.

    :raises ValueError, KeyError, TypeError: The value was not packed by this module.
    """
    kind, rest = value[:1], value[1:]
    if kind == _VECTOR:
        vector = array.array("d")
        vector.frombytes(rest)
        return Reply(vectors=(tuple(vector),))
    if kind != _TEXT:
        raise ValueError(f"unknown kind: {kind!r}")
    kept = json.loads(rest)
    text, finish_reason = kept["text"], kept["finish_reason"]
    if not isinstance(text, str) or not isinstance(finish_reason, str):
        raise TypeError("the text is not a string")
    return Reply(
        text=text,
        finish_reason=finish_reason,
        prompt_tokens=count_of(kept["prompt_tokens"]),
        completion_tokens=count_of(kept["completion_tokens"]),
    )


WINDOW = 60.0
"""Window of `rpm` and `tpm` in seconds."""
CALLS_KEPT = 1_000_000
"""Number of call records to keep. Totals are stored separately."""
_PRUNE_EVERY = 10_000
_POLL = 0.5
"""Longest wait in seconds for a request in progress to be settled."""
_COUNTS = ("calls", "cached", "failed", "estimated", "prompt_tokens", "completion_tokens", "cost")


@dataclass(frozen=True, kw_only=True)
class Account:
    """Identity under which requests are counted together."""

    scope: str
    name: str
    server: str
    """Server URL. `rpm` and `tpm` are counted by server and `model`, over all scopes."""
    section: HelperModel

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float:
        price = self.section.price
        return (prompt_tokens * price.input + completion_tokens * price.output) / 1e6 if price else 0.0


@dataclass(frozen=True)
class Wait:
    """The request must wait for this many seconds."""

    seconds: float


@dataclass(frozen=True)
class Spent:
    """The budget does not allow the request."""

    spent: float
    next: float
    budget: float
    key: str
    """The exhausted budget: `budget` or `budget_tokens`."""
    calls: int


class Ledger:
    """Enter and settle requests."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def enter(self, account: Account, question: Question) -> int | Wait | Spent:
        """Enter a request before it is sent if limits and budget allow it now, and return its record number."""
        prompt, completion = question.prompt_estimate, question.most_completion
        cost = account.cost(prompt, completion)
        with self.database.writing() as db:
            now = time.time()
            for key, wanted in (("budget", cost), ("budget_tokens", float(prompt + completion))):
                if (refused := _over(db, account, key, wanted)) is not None:
                    return refused
            if (wait := _too_fast(db, account, prompt + completion, now)) > 0:
                return Wait(wait)
            return _record(db, account, question, "sent", (prompt, completion, 1, cost))

    def settle(
        self,
        account: Account,
        permit: int,
        *,
        prompt_tokens: int = 0,
        completion_tokens: int = 0,
        estimated: bool = False,
        seconds: float = 0.0,
        error: str | None = None,
    ) -> float:
        """Enter the usage of a request.

        :param error: Reason why there is no valid answer.
        :returns: The cost.
        """
        used = Usage(
            calls=1,
            failed=int(error is not None),
            estimated=int(estimated),
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            cost=account.cost(prompt_tokens, completion_tokens),
        )
        state = "failed" if used.failed else "answered"
        with self.database.writing() as db:
            changed = db.execute(
                "UPDATE calls SET state = :state, prompt_tokens = :prompt_tokens, completion_tokens ="
                " :completion_tokens, estimated = :estimated, cost = :cost, seconds = :seconds, error = :error"
                " WHERE id = :id AND state = 'sent'",
                {**asdict(used), "state": state, "seconds": seconds, "error": error, "id": permit},
            )
            if changed.rowcount:
                _add(db, (account.scope, account.name), used)
        return used.cost

    def cached(self, account: Account, question: Question, count: int = 1) -> None:
        """Enter answers that were read from the cache."""
        with self.database.writing() as db:
            for _ in range(count):
                _record(db, account, question, "cached", (0, 0, 0, 0.0))
            _add(db, (account.scope, account.name), Usage(cached=count))

    def usage(self, scope: str, name: str) -> Usage:
        """Return what a scope used of a helper model so far, without requests in progress."""
        with self.database.reading() as db:
            return _totals(db, scope, name)

    def begin(self, scope: str) -> None:
        """Reset the counts of a scope, for a run that starts over. Earlier call records are kept."""
        with self.database.writing() as db:
            db.execute("UPDATE calls SET state = 'lost' WHERE scope = ? AND state = 'sent'", (scope,))
            db.execute("DELETE FROM totals WHERE scope = ?", (scope,))


def _record(
    db: sqlite3.Connection, account: Account, question: Question, state: str, took: tuple[int, int, int, float]
) -> int:
    """Enter a record and return its number. The oldest records are pruned at regular intervals.

    :param took: Prompt tokens, answer tokens, whether they are estimated, and the cost.
    """
    whose = (account.scope, account.name, account.server, account.section.model)
    cursor = db.execute(
        "INSERT INTO calls (time, scope, name, server, model, purpose, key, state, process, prompt_tokens,"
        " completion_tokens, estimated, cost) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (time.time(), *whose, question.purpose, question.key, state, _process(os.getpid()), *took),
    )
    number = int(cursor.lastrowid or 0)
    if number % _PRUNE_EVERY == 0:
        db.execute("DELETE FROM calls WHERE id <= ? AND state <> 'sent'", (number - CALLS_KEPT,))
    return number


def _over(db: sqlite3.Connection, account: Account, key: str, wanted: float) -> Wait | Spent | None:
    """Return whether another request would exceed a budget: permanently, or while other requests are in progress."""
    if (budget := getattr(account.section, key)) is None:
        return None
    column = "cost" if key == "budget" else "prompt_tokens + completion_tokens"
    for attempt in range(2):
        held = float(
            db.execute(
                f"SELECT COALESCE(SUM({column}), 0) FROM calls WHERE scope = ? AND name = ? AND state = 'sent'",
                (account.scope, account.name),
            ).fetchone()[0]
        )
        total = _totals(db, account.scope, account.name)
        spent = total.cost if key == "budget" else float(total.tokens)
        if spent + wanted > budget:
            return Spent(spent=spent, next=wanted, budget=budget, key=key, calls=total.calls)
        if spent + held + wanted <= budget:
            return None
        if attempt == 0:
            _settle_lost(db, account)
    return Wait(_POLL)


def _too_fast(db: sqlite3.Connection, account: Account, tokens: int, now: float) -> float:
    """Return the seconds until another request fits `rpm` and `tpm`, or 0."""
    section = account.section
    if section.rpm is None and section.tpm is None:
        return 0.0
    sent = db.execute(
        "SELECT time, prompt_tokens + completion_tokens FROM calls"
        " WHERE server = ? AND model = ? AND time > ? AND state <> 'cached' ORDER BY time",
        (account.server, account.section.model, now - WINDOW),
    ).fetchall()
    wait = 0.0
    if section.rpm is not None and len(sent) >= section.rpm:
        wait = sent[len(sent) - section.rpm][0] + WINDOW - now
    if section.tpm is not None:
        left = sum(row[1] for row in sent)
        for sent_at, took in sent:  # a request larger than the limit is sent when no other request counts
            if left + tokens <= section.tpm:
                break
            left -= took
            wait = max(wait, sent_at + WINDOW - now)
    return max(wait, 0.0)


def _settle_lost(db: sqlite3.Connection, account: Account) -> None:
    """Count requests of ended processes with their maximum usage, because they may have been answered."""
    whose = (account.scope, account.name)
    rows = db.execute(
        "SELECT id, process, prompt_tokens, completion_tokens, cost FROM calls"
        " WHERE scope = ? AND name = ? AND state = 'sent'",
        whose,
    ).fetchall()
    running = {process: _runs(process) for process in {row[1] for row in rows}}
    for number, process, prompt, completion, cost in rows:
        if not running[process]:
            db.execute("UPDATE calls SET state = 'lost', error = 'its process ended' WHERE id = ?", (number,))
            used = Usage(calls=1, failed=1, estimated=1, prompt_tokens=prompt, completion_tokens=completion, cost=cost)
            _add(db, whose, used)


def _add(db: sqlite3.Connection, whose: tuple[str, str], used: Usage) -> None:
    db.execute("INSERT OR IGNORE INTO totals (scope, name) VALUES (?, ?)", whose)
    sums = ", ".join(f"{column} = {column} + ?" for column in _COUNTS)
    values = [getattr(used, column) for column in _COUNTS]
    db.execute(f"UPDATE totals SET {sums} WHERE scope = ? AND name = ?", (*values, *whose))


def _totals(db: sqlite3.Connection, scope: str, name: str) -> Usage:
    query = f"SELECT {', '.join(_COUNTS)} FROM totals WHERE scope = ? AND name = ?"
    row = db.execute(query, (scope, name)).fetchone()
    return Usage(**dict(zip(_COUNTS, row, strict=True))) if row else Usage()


@functools.lru_cache(maxsize=4)
def _process(pid: int) -> str:
    return f"{pid} {process_start_time(pid)}"


def _runs(process: str) -> bool:
    pid, _, started = process.partition(" ")
    return is_same_process(int(pid), started)
