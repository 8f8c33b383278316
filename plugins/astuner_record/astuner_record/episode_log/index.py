"""The index of a log: a row per episode with what lists, filters and searches need, in SQLite.

Derived data.  Each file is indexed up to an offset, and whoever opens the index goes on from there.  Of a file that
has become shorter (a run was resumed) the end is forgotten; one that is another than was indexed (its id differs) is
indexed anew; and an index that is damaged or of another version is made again.  The run and those who look at it may do
this at the same time: a batch is entered in the transaction that finds it to be the next one.  Invariant: of an episode
that is in the log twice (drawn again, or a validation that was begun again) the index has the newer.
"""

from __future__ import annotations

import itertools
import json
import re
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from astuner_record.episode_log.schema import CREDIT, INDEX, TOKENS, files
from astuner_record.episode_log.stream import Place, StreamFile, TornHeader

VERSION = 2
TEXT_LIMIT = 100_000
"""Characters of an episode's messages that can be searched."""
SEPARATOR = "\x1f"
"""Around each name in the columns ``agents`` and ``tools``."""
_BATCHES = 500
"""Entered in one transaction, so that the run's own entries wait for a moment only."""

_TABLES = """
CREATE TABLE files (
    name TEXT PRIMARY KEY, file_id TEXT NOT NULL, until INTEGER NOT NULL, replaces INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE episodes (
    id INTEGER PRIMARY KEY AUTOINCREMENT, file TEXT NOT NULL, offset INTEGER NOT NULL, length INTEGER NOT NULL,
    row INTEGER NOT NULL, episode_id TEXT NOT NULL, group_id TEXT NOT NULL, task_id TEXT NOT NULL,
    step INTEGER NOT NULL, split TEXT NOT NULL, attempt INTEGER NOT NULL, time REAL NOT NULL, query TEXT NOT NULL,
    stop_reason TEXT NOT NULL, reward REAL, success INTEGER, error TEXT NOT NULL, seconds REAL NOT NULL,
    retries INTEGER NOT NULL, agents TEXT NOT NULL, tools TEXT NOT NULL, turns INTEGER NOT NULL,
    tokens INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL, branches INTEGER NOT NULL
);
CREATE INDEX by_episode ON episodes (episode_id);
CREATE INDEX by_step ON episodes (step, split);
CREATE INDEX by_group ON episodes (group_id);
CREATE INDEX by_task ON episodes (task_id);
CREATE INDEX by_reward ON episodes (reward);
CREATE INDEX by_file ON episodes (file, offset);
CREATE TABLE credit (
    file TEXT NOT NULL, offset INTEGER NOT NULL, length INTEGER NOT NULL, row INTEGER NOT NULL,
    step INTEGER NOT NULL, episode_id TEXT NOT NULL, sample INTEGER NOT NULL, agent TEXT NOT NULL,
    policy TEXT NOT NULL, advantage REAL, token_weight REAL, reward REAL, trained_tokens INTEGER NOT NULL,
    PRIMARY KEY (episode_id, sample)
) WITHOUT ROWID;
CREATE INDEX credit_by_file ON credit (file, offset);
CREATE VIRTUAL TABLE text USING fts5 (body, content='', columnsize=0);
"""
_INSERT = f"INSERT INTO episodes VALUES (NULL, {', '.join('?' * 24)})"
_WIDE = re.compile(r"([\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\uac00-\ud7af])")
"""Characters of scripts without spaces: each is a word of its own."""


class Index:
    """An open index; of one thread."""

    def __init__(self, folder: Path, *, to_read: bool = False) -> None:
        """Open or make the index of the log in ``folder``.

        :param to_read: where the folder cannot be written, make it in memory.
        :raises sqlite3.Error: it cannot be opened or made.
        """
        self._folder = folder
        self._forgot_all = False
        try:
            self.db = _connect(folder / INDEX)
        except sqlite3.OperationalError as e:
            if not to_read or not re.search("readonly|unable to open", str(e)):
                raise
            self.db = _made(sqlite3.connect(":memory:", isolation_level=None))
        except sqlite3.DatabaseError:  # damaged, or an older ASTuner's
            try:
                for end in ("", "-wal", "-shm"):
                    (folder / f"{INDEX}{end}").unlink(missing_ok=True)
                self.db = _connect(folder / INDEX)
            except PermissionError:
                if not to_read:
                    raise
                self.db = _made(sqlite3.connect(":memory:", isolation_level=None))

    def refresh(self) -> tuple[str, ...]:
        """Enter whatever the files hold that is not in the index yet.

        :returns: what is torn or gone, a sentence each.
        :raises DataError: a file is damaged, or is not of this log.
        """
        known = {row[0] for row in self.db.execute("SELECT name FROM files")}  # first: a run adds files meanwhile
        found, problems = files(self._folder), []
        self._forgot_all = False
        for gone in known - {p.name for p in found}:
            self._forget(gone)
        for path in found:
            try:
                file = StreamFile(path)
            except TornHeader:
                self._forget(path.name)
                continue
            except FileNotFoundError:  # a resumed run removed it just now
                continue
            try:
                self._catch_up(file)
                if file.is_torn:
                    lost = file.size - file.whole_until
                    problems.append(f"{path.name}: its last {lost:,} bytes are not a whole batch, and are skipped")
            finally:
                file.close()
        return self.refresh() if self._forgot_all else tuple(problems)

    def is_of(self, name: str, file_id: str) -> bool:
        """Whether the file of that name with that id is the one that was indexed."""
        return self._until(name, file_id) is not None

    def commit(self) -> None:
        if self.db.in_transaction:
            self.db.execute("COMMIT")

    def close(self) -> None:
        self.commit()
        self.db.close()

    def _catch_up(self, file: StreamFile) -> None:
        name = file.path.name
        until = self._until(name, file.file_id)
        if until is None:
            self._forget(name)
        elif until > file.size:
            self._forget(name, file)
        until = self._until(name, file.file_id) or file.start
        batches: Iterator[tuple[Place, Any]] = file.batches(until)
        more = True
        while more:
            more = False
            self.db.execute("BEGIN IMMEDIATE")
            try:
                for number, (place, batch) in enumerate(batches, start=1):
                    if (self._until(name, file.file_id) or file.start) == place.offset:
                        self._enter(name, file.file_id, file.kind, place, batch)
                    if number == _BATCHES:
                        more = True
                        break
            finally:
                self.commit()

    def _until(self, name: str, file_id: str) -> int | None:
        """Up to where a file is indexed; None where that very file is not."""
        row = self.db.execute("SELECT file_id, until FROM files WHERE name = ?", (name,)).fetchone()
        return row[1] if row is not None and row[0] == file_id else None

    def _forget(self, name: str, shorter: StreamFile | None = None) -> None:
        """Forget a file, or what it had beyond its end; and everything, if older rows may count again without that."""
        self.db.execute("BEGIN IMMEDIATE")
        size = shorter.size if shorter else 0
        for table in ("episodes", "credit"):
            self.db.execute(f"DELETE FROM {table} WHERE file = ? AND offset + length > ?", (name, size))
        if self.db.execute("SELECT 1 FROM files WHERE name = ? AND replaces", (name,)).fetchone():
            for table in ("episodes", "credit", "files"):
                self.db.execute(f"DELETE FROM {table}")
            self._forgot_all = True
        elif shorter:
            ends = [
                self.db.execute(f"SELECT max(offset + length) FROM {table} WHERE file = ?", (name,)).fetchone()[0]
                for table in ("episodes", "credit")
            ]
            until = max((end for end in ends if end), default=shorter.start)
            self.db.execute("UPDATE files SET until = ? WHERE name = ?", (until, name))
        else:
            self.db.execute("DELETE FROM files WHERE name = ?", (name,))
        self.commit()

    def _enter(self, name: str, file_id: str, kind: str, place: Place, batch: Any) -> None:
        where = (name, place.offset, place.length)
        replaces = 0
        if kind == TOKENS:
            for number, (facts, text) in enumerate(_episodes(batch)):
                known = self.db.execute(
                    "SELECT id, file, offset FROM episodes WHERE episode_id = ?", facts[:1]
                ).fetchone()
                if known is not None:
                    if known[1:] > where[:2]:
                        continue
                    replaces = 1
                    self.db.execute("DELETE FROM episodes WHERE id = ?", known[:1])
                id_ = self.db.execute(_INSERT, (*where, number, *facts)).lastrowid
                self.db.execute("INSERT INTO text (rowid, body) VALUES (?, ?)", (id_, text))
        elif kind == CREDIT:
            rows = [
                (*where, number, *facts)
                for number, facts in enumerate(_credits(batch))
                if not self._is_credited(facts[1], where)
            ]
            gone = self.db.executemany("DELETE FROM credit WHERE episode_id = ?", {(row[5],) for row in rows})
            replaces = int(gone.rowcount > 0)
            self.db.executemany(f"INSERT INTO credit VALUES ({', '.join('?' * 13)})", rows)
        self.db.execute(
            "INSERT INTO files VALUES (?, ?, ?, ?) ON CONFLICT (name) DO UPDATE SET file_id = excluded.file_id, "
            "until = excluded.until, replaces = max(replaces, excluded.replaces)",
            (name, file_id, place.end, replaces),
        )

    def _is_credited(self, episode_id: str, where: tuple[str, int, int]) -> bool:
        """Whether the credit that is known of an episode was written after what is at ``where``."""
        sql = "SELECT max((file, offset) > (?, ?)) FROM credit WHERE episode_id = ?"
        return bool(self.db.execute(sql, (*where[:2], episode_id)).fetchone()[0])


def match_of(text: str) -> str:
    """What FTS5 is asked for the messages that hold all words of ``text``, whole or begun; "" if there is no word."""
    words = [" ".join(re.findall(r"\w+", _words(word))) for word in text.split()]
    return " ".join(f'"{word}"*' for word in words if word)


def _words(text: str) -> str:
    return text if text.isascii() else _WIDE.sub(r" \1 ", text)


def _connect(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=30, isolation_level=None)
    try:
        return _made(db)
    except BaseException:
        db.close()
        raise


def _made(db: sqlite3.Connection) -> sqlite3.Connection:
    """``db`` with the tables in it.

    :raises sqlite3.DatabaseError: it is of another version, or damaged.
    """
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = NORMAL")  # no wait for the disk at each commit: the files have it all
    db.execute("BEGIN IMMEDIATE")
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version == 0:
        for statement in _TABLES.strip().removesuffix(";").split(";\n"):
            db.execute(statement)
        db.execute(f"PRAGMA user_version = {VERSION}")
    db.execute("COMMIT")
    if version not in (0, VERSION):
        raise sqlite3.DatabaseError(f"an index of version {version}")
    return db


_PLAIN = (
    "episode_id", "group_id", "task_id", "step", "split", "attempt", "time", "query", "stop_reason", "reward",
    "is_success", "error", "seconds", "retries",
)  # fmt: skip
_OF_TURNS = ("agent", "continues", "response_tokens")
_MESSAGES = ("request", "reply")


def _episodes(batch: Any) -> Iterator[tuple[tuple[Any, ...], str]]:
    """For each row of a batch the columns of ``episodes`` after the place, and the text to search in."""
    plain = [batch.column(name).to_pylist() for name in _PLAIN]
    turns, externals = batch.column("turns"), batch.column("external")
    own_turns, others_turns = turns.flatten(), externals.flatten()
    flat = {name: own_turns.field(name).to_pylist() for name in _OF_TURNS}
    flat |= {name: _parsed(own_turns.field(name)) for name in _MESSAGES}
    fresh = own_turns.field("prompt_ids").value_lengths().to_pylist()
    outside = {"agent": others_turns.field("agent").to_pylist()}
    outside |= {name: _parsed(others_turns.field(name)) for name in _MESSAGES}
    ends = [0, *itertools.accumulate(turns.value_lengths().to_pylist())]
    outside_ends = [0, *itertools.accumulate(externals.value_lengths().to_pylist())]
    for i, row in enumerate(zip(*plain, strict=True)):
        own, others = slice(ends[i], ends[i + 1]), slice(outside_ends[i], outside_ends[i + 1])
        agents = [*flat["agent"][own], *outside["agent"][others]]
        replies = [*flat["reply"][own], *outside["reply"][others]]
        requests = [*flat["request"][own], *outside["request"][others]]
        query, error = row[_PLAIN.index("query")], row[_PLAIN.index("error")]
        facts = (
            *row[:7],
            query[:300],
            *row[8:],
            _names(agents),
            _names(name for reply in replies for name in _called(reply)),
            len(agents),
            sum(flat["response_tokens"][own]),
            sum(fresh[own]),
            sum(before is None for before in flat["continues"][own]),
        )
        said = "\n".join([query, error, *_texts(requests), *_texts([replies])])
        yield facts, _words(_storable(said[:TEXT_LIMIT]))


def _parsed(column: Any) -> list[Any]:
    """The values of a column of JSON texts; one call for all of them costs less than one for each."""
    values: list[Any] = json.loads(f"[{','.join(column.to_pylist())}]")
    return values


def _names(names: Any) -> str:
    unique = list(dict.fromkeys(names))
    return _storable(SEPARATOR + SEPARATOR.join(unique) + SEPARATOR) if unique else ""


def _storable(text: str) -> str:
    """``text`` without half surrogates, which JSON can hold and SQLite cannot."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _called(reply: Any) -> Iterator[str]:
    """The names of the tools that a message calls."""
    for call in (reply.get("tool_calls") or ()) if isinstance(reply, dict) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            yield function["name"]


def _texts(conversations: Sequence[Any]) -> Iterator[str]:
    """What messages say; content may be text or parts of it."""
    for message in (m for messages in conversations for m in messages if isinstance(m, dict)):
        content = message.get("content")
        for part in content if isinstance(content, list) else [content]:
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(text, str):
                yield text
        for call in message.get("tool_calls") or ():
            if isinstance(call, dict) and isinstance(call.get("function"), dict):
                yield str(call["function"].get("arguments", ""))


def _credits(batch: Any) -> Iterator[tuple[Any, ...]]:
    names = ("step", "episode_id", "sample", "agent", "policy", "advantage", "token_weight", "reward", "trained_tokens")
    return zip(*(batch.column(name).to_pylist() for name in names), strict=True)
