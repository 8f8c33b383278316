"""Database ``episodes.sqlite``: every episode with its tokens, its credit, and lists to filter and search.

An episode is in the database when the call that logs it returns. A commit is in SQLite's write-ahead log, so a killed
process loses no episode.

Table ``data`` contains all rows as written. Readers derive ``episodes`` and ``text`` from it. If an episode was written
twice (generated again, or a validation that was restarted), they contain the newer row only. Invariant: the rows that
are not listed yet are those after the last listed row.

A row ID is the microsecond in which the row was written. IDs increase and are not reused after a rewind, without the
extra page write of AUTOINCREMENT. Rows of a run are similar, so the first row with a turn serves as compression
dictionary for later rows, which then take a third of the space and less time.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from astuner.contracts.errors import DataError, RunError
from astuner.contracts.types import Episode, Sample
from astuner_record.episode_log import format1
from astuner_record.episode_log.rows import (
    CREDIT,
    EPISODE,
    EPISODES,
    Row,
    credit_rows,
    episode_row,
    fitted,
    packed,
    unpacked,
)
from astuner_record.episode_log.side_files import closed, foreign_files, opened, set_aside

FORMAT = 3
DATABASE = "episodes.sqlite"
TEXT_LIMIT = 100_000
"""Maximum searchable characters of an episode's messages."""
_QUERY = 300
"""Maximum characters of a query in lists."""
SEPARATOR = "\x1f"
"""Separator around each name in the columns ``agents`` and ``tools``."""
_APPLICATION = 0x41535445
"""SQLite application ID: ASTE."""
_CHECKPOINT = 4096
"""Approximate 4 KiB pages in the write-ahead log before a checkpoint, which waits for the disk."""

_DICTIONARY = 32 << 10
"""Maximum bytes of the dictionary."""
_SHORT = 8 << 10
"""Rows below this size use the faster compression level, which with a dictionary gives the same size."""
_ADD = "INSERT INTO data VALUES (?, ?, ?, ?)"

_TABLES = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS data (
    id INTEGER PRIMARY KEY, episode_id TEXT NOT NULL, step INTEGER NOT NULL, row BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS dictionary (id INTEGER PRIMARY KEY CHECK (id = 1), content BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS credit (
    step INTEGER NOT NULL, episode_id TEXT NOT NULL, group_id TEXT NOT NULL, agent TEXT NOT NULL, role TEXT NOT NULL,
    policy TEXT NOT NULL, sample INTEGER NOT NULL, advantage REAL, token_weight REAL, reward REAL,
    tokens INTEGER NOT NULL, trained_tokens INTEGER NOT NULL, policy_version INTEGER NOT NULL, trainer_logprobs BLOB,
    PRIMARY KEY (episode_id, step, sample)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS problems (text TEXT NOT NULL);
PRAGMA application_id = {_APPLICATION};
PRAGMA user_version = {FORMAT};
{{}}
COMMIT;
"""
_LISTS = """
CREATE TABLE IF NOT EXISTS {0} (
    id INTEGER PRIMARY KEY, episode_id TEXT NOT NULL UNIQUE, group_id TEXT NOT NULL, task_id TEXT NOT NULL,
    step INTEGER NOT NULL, split TEXT NOT NULL, attempt INTEGER NOT NULL, time REAL NOT NULL, query TEXT NOT NULL,
    stop_reason TEXT NOT NULL, reward REAL, success INTEGER, error TEXT NOT NULL, seconds REAL NOT NULL,
    retries INTEGER NOT NULL, agents TEXT NOT NULL, tools TEXT NOT NULL, turns INTEGER NOT NULL,
    tokens INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL, branches INTEGER NOT NULL
);
CREATE VIRTUAL TABLE IF NOT EXISTS {1} USING fts5 (body, content='', columnsize=0);
"""
_OF_ALL, _OF_READERS = ("main.episodes", "main.text"), ("temp.newer", "temp.newer_text")
_READING = f"""
PRAGMA temp_store = MEMORY;
{_LISTS.format(*_OF_READERS)}
CREATE TEMP VIEW unlisted AS SELECT * FROM temp.newer
    WHERE id > (SELECT ifnull(max(id), 0) FROM main.episodes)
    AND EXISTS (SELECT 1 FROM main.data WHERE main.data.id = temp.newer.id);
CREATE TEMP VIEW episodes AS
    SELECT * FROM main.episodes
    WHERE id NOT IN (SELECT id FROM main.episodes WHERE episode_id IN (SELECT episode_id FROM unlisted))
    UNION ALL SELECT * FROM unlisted;
"""
"""Readers list rows that the writer has not listed in their own temporary tables, so they never block the writer.
For a reader, ``episodes`` is the union of both. A resumed run may have listed or deleted some of these rows since."""
FOUND = "SELECT rowid FROM main.text WHERE text MATCH ? UNION ALL SELECT rowid FROM newer_text WHERE newer_text MATCH ?"
FACTS = (
    "episode_id", "group_id", "task_id", "step", "split", "attempt", "time", "query", "stop_reason", "reward",
    "is_success", "error", "seconds", "retries",
)  # fmt: skip
"""Columns of ``episodes`` after the ID. The six columns that `_facts` counts follow."""
_CREDIT = f"INSERT INTO credit ({', '.join(CREDIT)}) VALUES ({', '.join('?' * len(CREDIT))})"
_LIST = f"INSERT OR REPLACE INTO {{}} VALUES ({', '.join('?' * (1 + len(FACTS) + 6))})"
_UNLISTED, _AT_ONCE = 16 << 20, 512 << 10
"""Bytes of uncompressed rows: those left to readers, which list them in less than a second, and those listed in one
transaction. Once the first limit is exceeded, only the second applies, because comparing ten runs reads ten logs."""
_LARGEST = 1 << 30
"""Maximum bytes of a row. A few kilobytes from an untrusted source could decompress to more."""
_WIDE = re.compile(r"([\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\uac00-\ud7af])")
"""Characters of scripts without spaces, each indexed as a word."""


_SAID = {"full": errno.ENOSPC, "I/O": errno.ENOSPC, "readonly": errno.EROFS}
"""SQLite error text -> errno, for a full disk (including a file size limit) and a read-only database."""


class _TaskOnly(msgspec.Struct):
    """The part of a row that filters by metadata read."""

    task: str


class Database(sqlite3.Connection):
    """Connection to ``episodes.sqlite``. A statement is its own transaction unless one was begun."""

    _dictionary: Any = None
    _compress: Callable[[bytes], bytes]
    _hurry: Callable[[bytes], bytes]
    _decompress: Callable[[bytes], bytes] | None = None
    _last = 0
    """ID of the last row that was written."""

    def close(self) -> None:
        """Close the connection; see `side_files.opened`."""
        closed(self)
        super().close()

    def begin(self) -> Database:
        """Begin an atomic transaction, for use as ``with db.begin():``."""
        self.execute("BEGIN IMMEDIATE")
        return self

    def add_episode(self, row: Any, id_: int | None = None) -> int:
        """Store a row of `EPISODES` as compressed MessagePack, and return its uncompressed size in bytes."""
        data, row = packed(row)
        if self._dictionary is None:
            self._learn(data[:_DICTIONARY] if row.turns else b"")
            self._last = self.execute("SELECT ifnull(max(id), 0) FROM data").fetchone()[0]
        self._last = id_ or max(self._last + 1, int(row.time * 1e6))
        frame = (self._hurry if len(data) < _SHORT else self._compress)(data)
        self.executemany(_ADD, ((self._last, row.episode_id, row.step, frame),))  # one SQLite call less than `execute`
        return len(data)

    def decoded(self, frame: bytes) -> tuple[Row, int]:
        """Return a `fitted` row, and its size in bytes."""
        data = self._unpacked(frame)
        return msgspec.msgpack.decode(data), len(data)

    def _unpacked(self, frame: bytes) -> bytes:
        import zstandard

        if self._dictionary is None:
            self._learn()
        if (size := zstandard.frame_content_size(frame)) > _LARGEST:
            raise DataError(f"a row of the episode log claims {size:,} bytes: ASTuner did not write it")
        return self._decompress(frame)  # type: ignore[misc]

    def task(self, frame: bytes) -> str:
        """Return the task of a row as JSON, without decoding the rest."""
        return msgspec.msgpack.decode(self._unpacked(frame), type=_TaskOnly).task

    def unpack(self, frame: bytes) -> Row:
        """Undo `fitted`."""
        return unpacked(self.decoded(frame)[0], EPISODE)

    def _learn(self, first: bytes = b"") -> None:
        """Load the dictionary, or store ``first`` as dictionary. Without one, rows are compressed independently."""
        import zstandard

        if first:
            self.execute("INSERT OR IGNORE INTO dictionary VALUES (1, ?)", (first,))
        found = self.execute("SELECT content FROM dictionary").fetchone() if _version(self) > 2 else None
        if found:
            self._dictionary = zstandard.ZstdCompressionDict(found[0], dict_type=zstandard.DICT_TYPE_RAWCONTENT)
        if found or self._decompress is None:
            compressor = partial(zstandard.ZstdCompressor, dict_data=self._dictionary, write_checksum=True)
            self._compress, self._hurry = compressor(level=1).compress, compressor(level=-1).compress
            self._decompress = zstandard.ZstdDecompressor(dict_data=self._dictionary).decompress


BUSY_SECONDS = 30
"""Seconds to wait for a lock of another process."""


class _Telling:
    """Context manager that converts SQLite errors to `OSError` and marks the writer as failed."""

    def __init__(self, writer: EpisodeLogWriter, path: Path) -> None:
        self._writer, self._path = writer, path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, e: BaseException | None, traceback: object) -> None:
        if isinstance(e, (sqlite3.Error, OSError)):
            self._writer.failed = True
        if isinstance(e, sqlite3.OperationalError) and "locked" in str(e):
            raise RunError(
                f"Another process has locked {self._path} for {BUSY_SECONDS} s, so episodes cannot be logged. "
                "Close it (for example a copy job or a database browser), then continue with --resume."
            ) from e
        if isinstance(e, sqlite3.Error):
            number = next((number for said, number in _SAID.items() if said in str(e)), errno.EIO)
            raise OSError(number, f"cannot write the episode log: {e}", str(self._path)) from e


class EpisodeLogWriter:
    """Writer of a run's log, for a single process. The first episode creates the database."""

    def __init__(self, folder: Path) -> None:
        """Create the writer.

        :param folder: ``episodes/`` of the run folder.
        """
        self._folder = folder
        self._db: Database | None = None
        self._unlisted = 0
        """Bytes of unlisted rows, unless a reader has listed them. `rewind` leaves none."""
        self._left = _UNLISTED
        """Bytes of unlisted rows that are left to readers."""
        self.failed = False
        """Whether a write error has been raised."""
        self._telling = _Telling(self, folder / DATABASE)

    def episode(self, step: int, episode: Episode) -> None:
        """Log an episode that ended.

        :raises OSError: The database cannot be written.
        :raises ValueError: A value does not fit its column.
        """
        row = episode_row(step, episode, time.time())
        with self._telling:
            db = self._db or self._open()
            self._unlisted += db.add_episode(row)
            if self._unlisted >= self._left:
                self._left = _AT_ONCE
                self._unlisted -= list_some(db) or self._unlisted

    def credit(self, step: int, samples: Sequence[Sample], trainer: Mapping[int, Any] | None = None) -> None:
        """Log the credit of a step's samples, replacing earlier credit of their episodes in this step.

        :param trainer: Index in ``samples`` -> the trainer's log-probabilities, float32 [trained tokens].
        :raises OSError: The database cannot be written.
        :raises ValueError: A value does not fit its column.
        """
        rows = credit_rows(step, samples, trainer or {})
        with self._telling, (self._db or self._open()).begin() as db:
            add_credit(db, rows)

    def close(self) -> None:
        """Close the database. SQLite merges its write-ahead log unless a reader is connected."""
        if self._db is not None:
            self._db.close()
            self._db = None

    def _open(self) -> Database:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._db = connect(self._folder)
        return self._db


def connect(folder: Path) -> Database:
    """Open or create the database in ``folder``, and convert a log of format 1.

    :raises sqlite3.Error: The database cannot be opened, created, or written.
    :raises DataError: The database is not an episode log, or has a newer format.
    """
    path = folder / DATABASE
    _convert_older(folder)
    aside = set_aside(foreign_files(path))
    db = _open(path)
    try:
        db.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT}")
        check(db, path)
        db.execute("PRAGMA synchronous = NORMAL")  # survives a power failure; waits for the disk rarely
        if _version(db) < FORMAT:
            db.execute("PRAGMA journal_mode = WAL")
            make_tables(db)
        db.executemany("INSERT INTO problems VALUES (?)", [(text,) for text in aside])
    except BaseException:
        db.close()
        raise
    return db


def _open(path: Path, how: str = "mode=rwc") -> Database:
    """Open a database, and register it as open in this process.

    :param how: SQLite URI parameters.
    """
    db = sqlite3.connect(
        f"{path.absolute().as_uri()}?{how}",
        uri=True,
        timeout=BUSY_SECONDS,
        isolation_level=None,
        check_same_thread=False,
        factory=Database,
    )
    opened(db, path)
    return db


def connect_to_read(folder: Path) -> Database:
    """Open the database in ``folder``, which may be read-only. The caller calls `list_all`.

    :raises sqlite3.Error: The database cannot be opened.
    :raises DataError: The database is missing, is not an episode log, or has a newer format.
    """
    path = folder / DATABASE
    with suppress(OSError):  # the folder is read-only
        _convert_older(folder)
    if not path.exists():
        if format1.is_there(folder):  # the folder is read-only, or an older ASTuner is writing the log
            db = make_temporary()
            _copy_older(folder, db)
            return db
        raise DataError(
            f"{folder} has no episode log. No episode has ended yet, or the run used "
            "astuner.trainer_common.save_tokens=false or an ASTuner version without a log."
        )
    alone = "immutable=1"  # works if SQLite cannot create its side files
    for how in (alone,) if foreign_files(path) else ("mode=ro", alone):
        db = _open(path, how)
        try:
            check(db, path)
            db.executescript(_READING)
            return db
        except BaseException as e:
            db.close()
            if how == alone or not isinstance(e, sqlite3.OperationalError):
                raise
    raise AssertionError("the last attempt returns or raises")


def check(db: sqlite3.Connection, path: Path) -> None:
    """Check that a database is an episode log of a supported format.

    :raises DataError: The database is not an episode log, or has a newer format.
    :raises sqlite3.Error: The file is not a database, or is damaged.
    """
    whose = db.execute("PRAGMA application_id").fetchone()[0]
    version = _version(db)
    empty = not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if whose != _APPLICATION and not empty:
        raise DataError(f"{path} was not written by ASTuner. Move it out of the run folder.")
    if version > FORMAT:
        raise DataError(
            f"{path} has format {version} of the episode log, but this ASTuner reads formats up to {FORMAT}. "
            "Upgrade it: pip install --upgrade astuner-record"
        )
    if db.execute("SELECT 1 FROM sqlite_master WHERE type IN ('trigger', 'view')").fetchone():
        raise DataError(f"{path} contains triggers or views, which ASTuner never creates. It is not read.")


def _version(db: sqlite3.Connection) -> int:
    """Return the format version, or 0 without tables."""
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def make_tables(db: Database) -> None:
    """Create missing tables. Tables of format 2 are kept."""
    db.executescript(_TABLES.format(_LISTS.format(*_OF_ALL)))


def rewind(folder: Path, step: int) -> tuple[str, ...]:
    """Delete what the log in ``folder`` contains about steps after ``step``. No process may be writing it.

    :returns: A message for each unreadable part of an older log.
    :raises DataError: The log is damaged.
    :raises OSError: The log cannot be written.
    """
    _convert_older(folder)
    if not (folder / DATABASE).exists():
        return ()
    try:
        with closing(connect(folder)) as db:
            while list_some(db):  # so that all text is indexed
                pass
            with db.begin():
                db.execute("CREATE TABLE IF NOT EXISTS rewinds (step INTEGER NOT NULL)")
                db.execute("INSERT INTO rewinds VALUES (?)", (step,))  # compared by `side_files`
                _forget_after(db, step)
            return problems(db)
    except sqlite3.Error as e:
        raise OSError(errno.EIO, str(e), str(folder / DATABASE)) from e


def problems(db: sqlite3.Connection) -> tuple[str, ...]:
    """Return a message for each unreadable part of an older log."""
    return tuple(text for (text,) in db.execute("SELECT text FROM problems ORDER BY rowid"))


def _convert_older(folder: Path) -> None:
    """Create the database from a log of format 1, unless it exists. The old files are kept.

    :raises OSError: The folder cannot be written.
    """
    path = folder / DATABASE
    if path.exists() or not format1.is_there(folder) or format1.is_being_written(folder):
        return
    temporary = folder / f".{DATABASE}.{os.getpid()}.tmp"
    try:
        temporary.touch(exist_ok=False)  # raises the most specific error
        with closing(_open(temporary)) as db:
            db.execute("PRAGMA synchronous = OFF")  # the conversion can be repeated
            _copy_older(folder, db)
            db.execute("PRAGMA journal_mode = WAL")
        if not path.exists():  # another process may have created it
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def make_temporary() -> Database:
    """Return an empty log for a reader, in memory or in a temporary file of SQLite."""
    db = sqlite3.connect("", isolation_level=None, check_same_thread=False, factory=Database)
    make_tables(db)
    db.executescript(_READING)
    return db


def _copy_older(folder: Path, db: Database) -> None:
    bad: list[str] = []
    make_tables(db)
    with db.begin():
        for id_, row in enumerate(format1.episodes(folder, bad), start=1):
            try:
                whole = fitted(row, EPISODE)
                _list(db, [(id_, *_facts(whole))])
                db.add_episode(EPISODES.row(*whole.values()), id_)
            except (AttributeError, LookupError, TypeError, ValueError, sqlite3.IntegrityError) as e:
                bad.append(f"episode {row.get('episode_id')!r} cannot be read ({e})")
        credit = format1.credit(folder, bad)
        for _, rows in itertools.groupby(credit, key=lambda row: (row["step"], row["episode_id"])):
            add_credit(db, [(*fitted(row, CREDIT).values(),) for row in rows])
        db.executemany("INSERT INTO problems VALUES (?)", [(text,) for text in bad])


def _forget_after(db: Database, step: int) -> None:
    for table in ("data", "episodes", "credit"):
        db.execute(f"DELETE FROM {table} WHERE step > ?", (step,))
    again = db.execute(  # older rows of episodes whose newer rows were deleted
        "SELECT max(id), row FROM data WHERE episode_id NOT IN (SELECT episode_id FROM episodes) GROUP BY episode_id"
    )
    listed = [(id_, *_facts(db.unpack(frame))[0]) for id_, frame in again.fetchall()]  # their text is still indexed
    db.executemany(_LIST.format("main.episodes"), listed)


def list_all(db: Database) -> None:
    """Update the lists of a reader, using temporary tables for rows that the database does not list."""
    while list_some(db, _OF_READERS):
        pass


def list_some(db: Database, into: tuple[str, str] = _OF_ALL) -> int:
    """List the oldest unlisted rows, and return their size in bytes, or 0 if all are listed."""
    ids = f"SELECT max(id) AS id FROM main.episodes UNION ALL SELECT max(id) FROM {into[0]}"
    (last,) = db.execute(f"SELECT ifnull(max(id), 0) FROM ({ids})").fetchone()
    found: list[tuple[Any, ...]] = []
    size = 0
    with closing(db.execute("SELECT id, row FROM data WHERE id > ? ORDER BY id", (last,))) as rows:
        for id_, frame in rows:
            row, bytes_ = db.decoded(frame)
            found.append((id_, *_facts(row)))
            size += bytes_
            if size >= _AT_ONCE:
                break
    if found:
        with db.begin() if into == _OF_ALL else db:  # readers take no lock
            _list(db, found, into)
    return size


def _list(db: sqlite3.Connection, found: Iterable[tuple[Any, ...]], into: tuple[str, str] = _OF_ALL) -> None:
    """Add entries to the lists.

    :param found: ID, facts and text of each row.
    """
    for id_, facts, said in found:
        db.execute(_LIST.format(into[0]), (id_, *facts))
        db.execute(f"INSERT INTO {into[1]} (rowid, body) VALUES (?, ?)", (id_, said))


def add_credit(db: Database, rows: Sequence[Sequence[Any]]) -> None:
    """Replace the credit of samples in their step. The caller has begun a transaction.

    :param rows: Rows of `CREDITS`.
    """
    try:
        db.executemany(_CREDIT, rows)
    except (sqlite3.IntegrityError, UnicodeEncodeError):  # some rows exist, or lone surrogates must be escaped
        made = [(*fitted(dict(zip(CREDIT, row, strict=True)), CREDIT).values(),) for row in rows]
        db.executemany("DELETE FROM credit WHERE step = ? AND episode_id = ?", {row[:2] for row in made})
        db.executemany(_CREDIT, made)


def _facts(row: Row) -> tuple[tuple[Any, ...], str]:
    """Return the list entry of a row, whose numbers may be packed, and its searchable text.

    A full scan of ``episodes`` takes well under a second, so only the name has an index. Every further index would
    add a 4 KiB page per episode to the write-ahead log.
    """
    turns, others = row["turns"], row["external"]
    everybody = (*turns, *others)
    requests, replies = ([parsed(turn[key]) for turn in everybody] for key in ("request", "reply"))
    facts = (
        *shown(row),
        _names(turn["agent"] for turn in everybody),
        _names(itertools.chain.from_iterable(map(_called, replies))),
        len(everybody),
        sum(turn["response_tokens"] for turn in turns),
        sum(len(ids) // 4 if isinstance(ids := turn["prompt_ids"], bytes) else len(ids) for turn in turns),
        sum(turn["continues"] is None for turn in turns),
    )
    said = "\n".join([row["query"], row["error"], *_texts(requests), *_texts([replies])])
    return facts, _words(storable(said[:TEXT_LIMIT]))


def shown(row: Row) -> tuple[Any, ...]:
    """Return the values of `FACTS`."""
    return (*(row[name][:_QUERY] if name == "query" else row[name] for name in FACTS),)


def parsed(text: str | bytes) -> Any:
    """Parse JSON as `json.loads` does, except for integers of more than 64 bits."""
    import orjson

    try:
        return orjson.loads(text)  # several times faster
    except ValueError:  # lone surrogates, or NaN and Infinity as written by Python's json
        return json.loads(text)


def match_of(text: str) -> str:
    """Return an FTS5 query for messages that contain all words or prefixes of ``text``, or "" without a word."""
    words = [" ".join(re.findall(r"\w+", _words(word))) for word in text.split()]
    return " ".join(f'"{word}"*' for word in words if word)


def _words(text: str) -> str:
    return text if text.isascii() else _WIDE.sub(r" \1 ", text)


def _names(names: Iterable[str]) -> str:
    unique = list(dict.fromkeys(names))
    return storable(SEPARATOR + SEPARATOR.join(unique) + SEPARATOR) if unique else ""


def storable(text: str) -> str:
    """Replace lone surrogates, which JSON can express and SQLite cannot."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _called(reply: Any) -> Iterator[str]:
    """Yield the names of the tools that a message calls."""
    for call in (reply.get("tool_calls") or ()) if isinstance(reply, dict) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            yield function["name"]


def _texts(conversations: Sequence[Any]) -> Iterator[str]:
    """Yield the text of messages, whose content may be a string or parts."""
    for message in (m for messages in conversations for m in messages if isinstance(m, dict)):
        content = message.get("content")
        for part in content if isinstance(content, list) else [content]:
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(text, str):
                yield text
        for call in message.get("tool_calls") or ():
            if isinstance(call, dict) and isinstance(call.get("function"), dict):
                yield str(call["function"].get("arguments", ""))
