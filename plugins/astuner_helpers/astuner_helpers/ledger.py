"""The database of this machine's helper models, and the answers in it: ``$ASTUNER_HOME/helper_models/calls.sqlite``.

All processes of a person share it, so it is where limits and budgets are counted; it holds answers and records, and
never a key.

The books say who may send a request now, and what each took.  A request is entered before it is sent, with the most
that it may take, and settled with what it took; so what is on its way counts towards limits and budgets, in every
process.  Invariants: whoever reads and then writes does so in one transaction, which no other process gets between; the
totals of a scope, with the most that its requests under way may take, never exceed its budget by more than what one
request took beyond its estimate.
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
"""How long another process may hold the database before that is an error."""
MOST_BYTES = 1 << 30
"""What all answers may take together."""
_LOOK_EVERY = 64
_AFTER_EVICTION = 0.9
_PER_QUERY = 500
_VECTOR, _TEXT = b"v", b"t"


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
            for statement in Path(__file__).with_name("calls.sql").read_text(encoding="utf-8").split(";\n"):
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
    return _at(astuner_home() / "helper_models" / "calls.sqlite")


@functools.cache
def _at(path: Path) -> Database:
    found = Database(path)
    atexit.register(found.close)
    return found


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


WINDOW = 60.0
"""Seconds over which `rpm` and `tpm` count."""
CALLS_KEPT = 1_000_000
"""Records of calls that are kept, the newest; totals are kept apart."""
_PRUNE_EVERY = 10_000
_POLL = 0.5
"""Longest wait for a request under way to be settled, in seconds."""
_COUNTS = ("calls", "cached", "failed", "estimated", "prompt_tokens", "completion_tokens", "cost")


@dataclass(frozen=True, kw_only=True)
class Account:
    """Whose requests are counted together."""

    scope: str
    name: str
    server: str
    """With `model`: what `rpm` and `tpm` are counted for, over all scopes."""
    section: HelperModel

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float:
        price = self.section.price
        return (prompt_tokens * price.input + completion_tokens * price.output) / 1e6 if price else 0.0


@dataclass(frozen=True)
class Wait:
    """Not yet: ask again after so many seconds."""

    seconds: float


@dataclass(frozen=True)
class Spent:
    """The budget does not allow it."""

    spent: float
    next: float
    budget: float
    key: str
    """Which budget: `budget` or `budget_tokens`."""
    calls: int


class Ledger:
    """Enters and settles requests."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def enter(self, account: Account, question: Question) -> int | Wait | Spent:
        """Enter one request before it is sent, if limits and budget allow it now; its number in the books."""
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
        """Enter what a request took.

        :param error: why there is no (valid) answer.
        :returns: its cost.
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
        """Enter answers that were taken from the cache."""
        with self.database.writing() as db:
            for _ in range(count):
                _record(db, account, question, "cached", (0, 0, 0, 0.0))
            _add(db, (account.scope, account.name), Usage(cached=count))

    def usage(self, scope: str, name: str) -> Usage:
        """What a scope used of a helper model so far, without what is under way."""
        with self.database.reading() as db:
            return _totals(db, scope, name)

    def begin(self, scope: str) -> None:
        """Count a scope from 0: a run that starts over. The records of what it did before are kept."""
        with self.database.writing() as db:
            db.execute("UPDATE calls SET state = 'lost' WHERE scope = ? AND state = 'sent'", (scope,))
            db.execute("DELETE FROM totals WHERE scope = ?", (scope,))


def _record(
    db: sqlite3.Connection, account: Account, question: Question, state: str, took: tuple[int, int, int, float]
) -> int:
    """Enter one record, and its number; the oldest are forgotten each time that so many more were entered.

    :param took: tokens of prompt and answer, whether they are estimated, and their cost.
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
    """Whether one more request would exceed a budget: for good, or as long as others are under way."""
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
    """Seconds until one more request fits `rpm` and `tpm`; 0: now."""
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
        for sent_at, took in sent:  # one that is larger than the limit goes when nothing else does
            if left + tokens <= section.tpm:
                break
            left -= took
            wait = max(wait, sent_at + WINDOW - now)
    return max(wait, 0.0)


def _settle_lost(db: sqlite3.Connection, account: Account) -> None:
    """Requests of processes that have ended were perhaps answered: they count with the most they may have taken."""
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
