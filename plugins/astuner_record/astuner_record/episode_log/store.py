"""``episodes.sqlite``: every episode with its tokens, what lists, filters and searches need of it, and its credit.

An episode is in the database when the call that logs it returns, so a process that is killed loses none: a commit is
with the system, in SQLite's write-ahead log.

``data`` holds all rows that were written, whole; ``episodes`` and ``text`` are made of it by whoever reads, and have of
an episode that was written twice (drawn again, or a validation that was begun again) the newer alone.  Invariant: what
is not in them yet are the rows after the last one that is.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from astuner.contracts.errors import DataError
from astuner.contracts.types import Episode, Sample
from astuner_record.episode_log import format1
from astuner_record.episode_log.columns import CREDIT, EPISODE, Row, fitted, unpacked
from astuner_record.episode_log.rows import credit_rows, episode_row

FORMAT = 2
DATABASE = "episodes.sqlite"
TEXT_LIMIT = 100_000
"""Characters of an episode's messages that can be searched."""
_QUERY = 300
"""Characters of a query that lists show."""
SEPARATOR = "\x1f"
"""Around each name in the columns ``agents`` and ``tools``."""
_APPLICATION = 0x41535445
"""What SQLite keeps of whose database it is: ASTE."""
_CHECKPOINT = 4096
"""Pages of 4 KiB in the write-ahead log, about, before SQLite sorts them in, and waits for the disk."""

_TABLES = """
CREATE TABLE data (
    id INTEGER PRIMARY KEY AUTOINCREMENT, episode_id TEXT NOT NULL, step INTEGER NOT NULL, row BLOB NOT NULL
);
CREATE TABLE credit (
    step INTEGER NOT NULL, episode_id TEXT NOT NULL, group_id TEXT NOT NULL, agent TEXT NOT NULL, role TEXT NOT NULL,
    policy TEXT NOT NULL, sample INTEGER NOT NULL, advantage REAL, token_weight REAL, reward REAL,
    tokens INTEGER NOT NULL, trained_tokens INTEGER NOT NULL, policy_version INTEGER NOT NULL, trainer_logprobs BLOB,
    PRIMARY KEY (episode_id, step, sample)
);
CREATE TABLE problems (text TEXT NOT NULL);
"""
_LISTS = """
CREATE TABLE {0}.episodes (
    id INTEGER PRIMARY KEY, episode_id TEXT NOT NULL UNIQUE, group_id TEXT NOT NULL, task_id TEXT NOT NULL,
    step INTEGER NOT NULL, split TEXT NOT NULL, attempt INTEGER NOT NULL, time REAL NOT NULL, query TEXT NOT NULL,
    stop_reason TEXT NOT NULL, reward REAL, success INTEGER, error TEXT NOT NULL, seconds REAL NOT NULL,
    retries INTEGER NOT NULL, agents TEXT NOT NULL, tools TEXT NOT NULL, turns INTEGER NOT NULL,
    tokens INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL, branches INTEGER NOT NULL
);
CREATE VIRTUAL TABLE {0}.text USING fts5 (body, content='', columnsize=0);
"""
_FACTS = (
    "episode_id", "group_id", "task_id", "step", "split", "attempt", "time", "query", "stop_reason", "reward",
    "is_success", "error", "seconds", "retries",
)  # fmt: skip
_LISTED = (
    "episode_id", "group_id", "task_id", "step", "split", "attempt", "time", "query", "stop_reason", "reward",
    "success", "error", "seconds", "retries", "agents", "tools", "turns", "tokens", "prompt_tokens", "branches",
)  # fmt: skip
"""The columns of ``episodes`` after the id; the first ones are `_FACTS` of the row."""
_LIST = f"INSERT OR REPLACE INTO episodes VALUES ({', '.join('?' * (len(_LISTED) + 1))})"
_UNLISTED, _AT_ONCE = 8 << 20, 256 << 10
"""Bytes of rows: those left to readers, who list them in less than a second, and those listed in one transaction."""
_WIDE = re.compile(r"([\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\uac00-\ud7af])")
"""Characters of scripts without spaces: each is a word of its own."""


_SAID = {"full": errno.ENOSPC, "I/O": errno.ENOSPC, "readonly": errno.EROFS}
"""What SQLite says of a disk that takes nothing more (of a file that may not grow, too), or is not to be written."""


class EpisodeLogWriter:
    """The log of a run, for the one process that writes it; the database is made with the first episode."""

    def __init__(self, folder: Path) -> None:
        """:param folder: ``episodes/`` of the run folder."""
        self._folder = folder
        self._db: sqlite3.Connection | None = None
        self._unlisted = 0
        """Bytes of rows that no list has yet, unless a reader has listed them: `rewind` leaves none."""
        self.failed = False
        """Whether the caller was told that the log cannot be written."""

    def episode(self, step: int, episode: Episode) -> None:
        """Log an episode that ended.

        :raises OSError: the database cannot be written.
        :raises ValueError: a value does not fit its column.
        """
        row = fitted(episode_row(step, episode, time.time()), EPISODE)
        with self._writing() as db:
            self._unlisted += add_episode(db, row)
            if self._unlisted >= _UNLISTED:
                self._unlisted -= list_some(db) or self._unlisted

    def credit(self, step: int, samples: Sequence[Sample], trainer: Mapping[int, Any] | None = None) -> None:
        """Log what a step's samples were credited with, instead of what was said of their episodes in it; raises as
        `episode`.

        :param trainer: place in ``samples`` -> the trainer's log-probabilities, float32 [trained tokens].
        """
        rows = credit_rows(step, samples, trainer or {})
        with self._writing() as db, transaction(db):
            add_credit(db, rows)

    def close(self) -> None:
        """Let go of the database; its write-ahead log is sorted in, unless somebody still reads it."""
        if self._db is not None:
            self._db.close()
            self._db = None

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        try:
            if self._db is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._db = connect(self._folder)
            yield self._db
        except sqlite3.Error as e:
            self.failed = True
            number = next((number for said, number in _SAID.items() if said in str(e)), errno.EIO)
            raise OSError(number, f"cannot write the episode log: {e}", str(self._folder / DATABASE)) from e
        except OSError:
            self.failed = True
            raise


def connect(folder: Path) -> sqlite3.Connection:
    """Open or make the database in ``folder``, with what an ASTuner that wrote format 1 left there.

    :raises sqlite3.Error: it cannot be opened, made, or written.
    :raises DataError: it is not the episode log's, or of a newer format.
    """
    path = folder / DATABASE
    _convert_older(folder)
    db = sqlite3.connect(path, timeout=30, isolation_level=None, check_same_thread=False)
    try:
        db.execute("PRAGMA synchronous = NORMAL")  # whole after a power cut; waits for the disk now and then only
        db.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT}")
        check(db, path)
        if not _version(db):
            db.execute("PRAGMA journal_mode = WAL")
            with transaction(db):
                if not _version(db):  # somebody else was faster
                    make_tables(db)
    except BaseException:
        db.close()
        raise
    return db


def connect_to_read(folder: Path) -> sqlite3.Connection:
    """Open the database in ``folder``, which may be one that cannot be written; `list_all` is the reader's to call.

    :raises sqlite3.Error: it cannot be opened.
    :raises DataError: there is none, it is not the episode log's, or of a newer format.
    """
    path = folder / DATABASE
    try:
        _convert_older(folder)
    except OSError:  # it cannot be written there
        return _in_memory(folder)
    if not path.exists():
        if format1.is_there(folder):
            return _in_memory(folder)
        raise DataError(
            f"there is no episode log in {folder}: no episode has ended yet, or the run was made with "
            "astuner.trainer_common.save_tokens=false, or by an ASTuner that wrote none"
        )
    for how in ("mode=rw", "immutable=1"):  # the latter where SQLite's own files beside it can be made by nobody
        db = sqlite3.connect(f"{path.absolute().as_uri()}?{how}", uri=True, timeout=30, isolation_level=None)
        try:
            check(db, path)
            db.execute("PRAGMA synchronous = NORMAL")
            return db
        except BaseException as e:
            db.close()
            if how == "immutable=1" or not isinstance(e, sqlite3.OperationalError):
                raise
    raise AssertionError("the last way returns or raises")


def check(db: sqlite3.Connection, path: Path) -> None:
    """
    :raises DataError: the database is not the episode log's, or of a newer format.
    """
    try:
        whose = db.execute("PRAGMA application_id").fetchone()[0]
        version = _version(db)
        empty = not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    except sqlite3.OperationalError:
        raise
    except sqlite3.DatabaseError as e:
        raise DataError(f"{path} is no database, or a damaged one ({e}); move it out of the run folder") from e
    if whose != _APPLICATION and not empty:
        raise DataError(f"{path} was not written by ASTuner; move it out of the run folder")
    if version > FORMAT:
        raise DataError(
            f"{path} has format {version} of the episode log, and this ASTuner reads formats up to {FORMAT}: "
            "pip install --upgrade astuner-record"
        )


def _version(db: sqlite3.Connection) -> int:
    """0: it has no tables yet."""
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def make_tables(db: sqlite3.Connection) -> None:
    """In an empty database; in one transaction with whatever the caller does."""
    _make(db, _TABLES + _LISTS.format("main"))
    db.execute(f"PRAGMA application_id = {_APPLICATION}")
    db.execute(f"PRAGMA user_version = {FORMAT}")


def _make(db: sqlite3.Connection, tables: str) -> None:
    for statement in tables.strip().removesuffix(";").split(";\n"):
        db.execute(statement)


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """All of it, or nothing."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:  # SQLite has ended it itself where the disk is full
            db.execute("ROLLBACK")
        raise


def rewind(folder: Path, step: int) -> tuple[str, ...]:
    """Forget what the log in ``folder`` says of steps after ``step``; nobody may be writing it.

    :returns: what of an older log cannot be read, a sentence each.
    :raises DataError: the log is damaged.
    :raises OSError: it cannot be written.
    """
    _convert_older(folder)
    if not (folder / DATABASE).exists():
        return ()
    try:
        with closing(connect(folder)) as db:
            while list_some(db):  # so that the words of all are there
                pass
            with transaction(db):
                _forget_after(db, step)
            return problems(db)
    except sqlite3.Error as e:
        raise OSError(errno.EIO, str(e), str(folder / DATABASE)) from e


def problems(db: sqlite3.Connection) -> tuple[str, ...]:
    """What of an older log cannot be read, a sentence each."""
    return tuple(text for (text,) in db.execute("SELECT text FROM problems ORDER BY rowid"))


def _convert_older(folder: Path) -> None:
    """Make the database of a log of format 1, unless there is one; the old files stay as they are.

    :raises OSError: the folder cannot be written.
    """
    path = folder / DATABASE
    if path.exists() or not format1.is_there(folder) or format1.is_being_written(folder):
        return
    temporary = folder / f".{DATABASE}.{os.getpid()}.tmp"
    try:
        temporary.touch(exist_ok=False)  # says best why it cannot
        with closing(sqlite3.connect(temporary, isolation_level=None)) as db:
            db.execute("PRAGMA synchronous = OFF")  # it is made again, if need be
            _copy_older(folder, db)
            db.execute("PRAGMA journal_mode = WAL")
        if not path.exists():  # somebody else was faster
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _in_memory(folder: Path) -> sqlite3.Connection:
    """A log of format 1 that cannot be converted: the folder cannot be written, or an older ASTuner still does it."""
    db = sqlite3.connect(":memory:", isolation_level=None)
    _copy_older(folder, db)
    return db


def _copy_older(folder: Path, db: sqlite3.Connection) -> None:
    bad: list[str] = []
    with transaction(db):
        make_tables(db)
        for id_, row in enumerate(format1.episodes(folder, bad), start=1):
            try:
                whole = fitted(row, EPISODE)
                _list(db, [(id_, *_facts(whole))])
                add_episode(db, whole, id_)
            except (AttributeError, LookupError, TypeError, ValueError, sqlite3.IntegrityError) as e:
                bad.append(f"episode {row.get('episode_id')!r} cannot be read ({e})")
        credit = format1.credit(folder, bad)
        for _, rows in itertools.groupby(credit, key=lambda row: (row["step"], row["episode_id"])):
            add_credit(db, rows)
        db.executemany("INSERT INTO problems VALUES (?)", [(text,) for text in bad])


def _forget_after(db: sqlite3.Connection, step: int) -> None:
    for table in ("data", "episodes", "credit"):
        db.execute(f"DELETE FROM {table} WHERE step > ?", (step,))
    again = db.execute(  # the older ones of episodes that were drawn again, and whose newer ones are forgotten
        "SELECT max(id), row FROM data WHERE episode_id NOT IN (SELECT episode_id FROM episodes) GROUP BY episode_id"
    )
    listed = [(id_, *_facts(unpack(packed))[0]) for id_, packed in again.fetchall()]  # their words are there still
    db.executemany(_LIST, listed)


def add_episode(db: sqlite3.Connection, row: Row, id_: int | None = None) -> int:
    """Store a row that is `fitted`; how many bytes it takes."""
    packed = pack(row)
    db.execute("INSERT INTO data VALUES (?, ?, ?, ?)", (id_, row["episode_id"], row["step"], packed))
    return len(packed)


def list_all(db: sqlite3.Connection) -> None:
    """Bring the lists up to date; in memory, for this connection alone, where the database cannot be written.

    :raises sqlite3.Error: they cannot be.
    """
    try:
        while list_some(db):
            pass
    except sqlite3.OperationalError as e:
        if not any(said in str(e) for said in _SAID):
            raise
        db.execute("PRAGMA temp_store = MEMORY")
        _make(db, _LISTS.format("temp"))  # from now on these are meant by the names
        list_all(db)


def list_some(db: sqlite3.Connection) -> int:
    """Enter the oldest rows that are in no list yet; how many bytes of rows, 0 where all are listed."""
    last = _last_listed(db)
    found: list[tuple[Any, ...]] = []
    size = 0
    with closing(db.execute("SELECT id, row FROM data WHERE id > ? ORDER BY id", (last,))) as rows:
        for id_, packed in rows:
            found.append((id_, *_facts(_decoded(packed))))
            size += len(packed)
            if size >= _AT_ONCE:
                break
    if found:
        with transaction(db):
            if _last_listed(db) == last:  # else somebody else was faster
                _list(db, found)
    return size


def _last_listed(db: sqlite3.Connection) -> int:
    return int(db.execute("SELECT ifnull(max(id), 0) FROM episodes").fetchone()[0])


def _list(db: sqlite3.Connection, found: Iterable[tuple[Any, ...]]) -> None:
    """:param found: id, facts and text of each."""
    for id_, facts, said in found:
        db.execute(_LIST, (id_, *facts))
        db.execute("INSERT INTO text (rowid, body) VALUES (?, ?)", (id_, said))


def add_credit(db: sqlite3.Connection, rows: Iterable[Row]) -> None:
    """Store the credit of samples instead of what their episodes have in that step; the caller has begun a transaction.

    :raises ValueError: a value does not fit its column.
    """
    made = [tuple(fitted(row, CREDIT).values()) for row in rows]
    gone = {(episode_id, step) for step, episode_id, *_ in made}
    db.executemany("DELETE FROM credit WHERE episode_id = ? AND step = ?", gone)
    db.executemany(f"INSERT INTO credit ({', '.join(CREDIT)}) VALUES ({', '.join('?' * len(CREDIT))})", made)


def pack(row: Row) -> bytes:
    """A row that is `fitted`, as ``data`` has it: MessagePack in a frame of Zstandard."""
    encode, compress, _ = _codec()
    packed: bytes = compress(encode(row))
    return packed


def unpack(packed: bytes) -> Row:
    """A row as it was before it was `fitted`."""
    return unpacked(_decoded(packed), EPISODE)


def _decoded(packed: bytes) -> Row:
    import msgspec

    _, _, decompress = _codec()
    row: Row = msgspec.msgpack.decode(decompress(packed))
    return row


def _codec() -> tuple[Any, Any, Any]:
    """Encodes, compresses, decompresses: one of each for a thread, for a compressor is none of two."""
    found: tuple[Any, Any, Any] | None = getattr(_OF_THREAD, "codec", None)
    if found is None:
        import msgspec
        import zstandard

        compressor, decompressor = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
        found = _OF_THREAD.codec = msgspec.msgpack.Encoder().encode, compressor.compress, decompressor.decompress
    return found


_OF_THREAD = threading.local()


def _facts(row: Row) -> tuple[tuple[Any, ...], str]:
    """What lists need of a row, whose numbers may be packed, and what is to be searched in it.

    A reader goes through all of ``episodes`` in well under a second, so no column but the name has an index: each would
    cost every episode a page of 4 KiB in the write-ahead log.
    """
    turns, others = row["turns"], row["external"]
    everybody = (*turns, *others)
    requests, replies = ([_parsed(turn[key]) for turn in everybody] for key in ("request", "reply"))
    facts = (
        *(row[name][:_QUERY] if name == "query" else row[name] for name in _FACTS),
        _names(turn["agent"] for turn in everybody),
        _names(itertools.chain.from_iterable(map(_called, replies))),
        len(everybody),
        sum(turn["response_tokens"] for turn in turns),
        sum(_length(turn["prompt_ids"]) for turn in turns),
        sum(turn["continues"] is None for turn in turns),
    )
    said = "\n".join([row["query"], row["error"], *_texts(requests), *_texts([replies])])
    return facts, _words(_storable(said[:TEXT_LIMIT]))


def _parsed(text: str) -> Any:
    import orjson

    try:
        return orjson.loads(text)  # several times as fast; of large numbers it makes others, which are not searched
    except ValueError:  # half a character
        return json.loads(text)


def _length(numbers: bytes | Sequence[int]) -> int:
    return len(numbers) // 4 if isinstance(numbers, bytes) else len(numbers)


def match_of(text: str) -> str:
    """What FTS5 is asked for the messages that hold all words of ``text``, whole or begun; "" if there is no word."""
    words = [" ".join(re.findall(r"\w+", _words(word))) for word in text.split()]
    return " ".join(f'"{word}"*' for word in words if word)


def _words(text: str) -> str:
    return text if text.isascii() else _WIDE.sub(r" \1 ", text)


def _names(names: Iterable[str]) -> str:
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
