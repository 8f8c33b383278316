"""``episodes.sqlite``: every episode with its tokens, what lists, filters and searches need of it, and its credit.

An episode is in the database when the call that logs it returns, so a process that is killed loses none: a commit is
with the system, in SQLite's write-ahead log.

``data`` holds all rows that were written, whole; ``episodes`` and ``text`` are made of it by whoever reads, and have of
an episode that was written twice (drawn again, or a validation that was begun again) the newer alone.  Invariant: what
is not in them yet are the rows after the last one that is.

A row's id is the microsecond in which it was written: ids grow, and none is given again after a rewind, without the
page that AUTOINCREMENT writes for each.  Rows of a run are much alike: the first one with a turn is the dictionary that
those after it are compressed with, which makes them a third as long, in less time.
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
"""Characters of an episode's messages that can be searched."""
_QUERY = 300
"""Characters of a query that lists show."""
SEPARATOR = "\x1f"
"""Around each name in the columns ``agents`` and ``tools``."""
_APPLICATION = 0x41535445
"""What SQLite keeps of whose database it is: ASTE."""
_CHECKPOINT = 4096
"""Pages of 4 KiB in the write-ahead log, about, before SQLite sorts them in, and waits for the disk."""

_DICTIONARY = 32 << 10
"""Bytes of it at most."""
_SHORT = 8 << 10
"""Bytes of rows that are compressed in half the time: with a dictionary they are as short all the same."""
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
"""What the writer has not listed, is listed by each reader for itself, who so never holds up the writer; to a reader
``episodes`` is both.  A resumed run may have listed or forgotten since what its lists have."""
FOUND = "SELECT rowid FROM main.text WHERE text MATCH ? UNION ALL SELECT rowid FROM newer_text WHERE newer_text MATCH ?"
FACTS = (
    "episode_id", "group_id", "task_id", "step", "split", "attempt", "time", "query", "stop_reason", "reward",
    "is_success", "error", "seconds", "retries",
)  # fmt: skip
"""The columns of ``episodes`` after the id; behind them come the six that `_facts` counts."""
_CREDIT = f"INSERT INTO credit ({', '.join(CREDIT)}) VALUES ({', '.join('?' * len(CREDIT))})"
_LIST = f"INSERT OR REPLACE INTO {{}} VALUES ({', '.join('?' * (1 + len(FACTS) + 6))})"
_UNLISTED, _AT_ONCE = 16 << 20, 512 << 10
"""Bytes of rows before they are compressed: those left to readers, who list them in less than a second, and those
listed in one transaction, which is all that is left once it was more: who compares ten large runs reads ten logs."""
_LARGEST = 1 << 30
"""Bytes of a row, which a few kilobytes of somebody else's may unfold to."""
_WIDE = re.compile(r"([\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\uac00-\ud7af])")
"""Characters of scripts without spaces: each is a word of its own."""


_SAID = {"full": errno.ENOSPC, "I/O": errno.ENOSPC, "readonly": errno.EROFS}
"""What SQLite says of a disk that takes nothing more (of a file that may not grow, too), or is not to be written."""


class Database(sqlite3.Connection):
    """``episodes.sqlite``, open; a statement is a transaction of its own, unless one was begun."""

    _dictionary: Any = None
    _compress: Callable[[bytes], bytes]
    _hurry: Callable[[bytes], bytes]
    _decompress: Callable[[bytes], bytes] | None = None
    _last = 0
    """Id of the last row that was written."""

    def close(self) -> None:
        """Close it; see `side_files.opened`."""
        closed(self)
        super().close()

    def begin(self) -> Database:
        """``with db.begin():`` all of it, or nothing."""
        self.execute("BEGIN IMMEDIATE")
        return self

    def add_episode(self, row: Any, id_: int | None = None) -> int:
        """Store a row of `EPISODES`, as MessagePack in a frame of Zstandard; how many bytes it is before that."""
        data, row = packed(row)
        if self._dictionary is None:
            self._learn(data[:_DICTIONARY] if row.turns else b"")
            self._last = self.execute("SELECT ifnull(max(id), 0) FROM data").fetchone()[0]
        self._last = id_ or max(self._last + 1, int(row.time * 1e6))
        frame = (self._hurry if len(data) < _SHORT else self._compress)(data)
        self.executemany(_ADD, ((self._last, row.episode_id, row.step, frame),))  # asks SQLite once less than `execute`
        return len(data)

    def decoded(self, frame: bytes) -> tuple[Row, int]:
        """A row that was `fitted`, and how many bytes it is."""
        import zstandard

        if self._dictionary is None:
            self._learn()
        if (size := zstandard.frame_content_size(frame)) > _LARGEST:
            raise DataError(f"a row of the episode log would have {size:,} bytes, as no run writes it")
        data = self._decompress(frame)  # type: ignore[misc]
        return msgspec.msgpack.decode(data), len(data)

    def unpack(self, frame: bytes) -> Row:
        """A row as it was before it was `fitted`."""
        return unpacked(self.decoded(frame)[0], EPISODE)

    def _learn(self, first: bytes = b"") -> None:
        """Find the dictionary, or have ``first`` be it; until there is one, rows are compressed by themselves."""
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
"""How long a lock of another process is waited for."""


class _Telling:
    """Within it, what SQLite raises becomes an `OSError`, and its writer has failed."""

    def __init__(self, writer: EpisodeLogWriter, path: Path) -> None:
        self._writer, self._path = writer, path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, e: BaseException | None, traceback: object) -> None:
        if isinstance(e, (sqlite3.Error, OSError)):
            self._writer.failed = True
        if isinstance(e, sqlite3.OperationalError) and "locked" in str(e):
            raise RunError(
                f"another process has had {self._path} locked for {BUSY_SECONDS} s, so episodes cannot be logged. "
                "Close that program (a copy, a database browser), then continue with --resume"
            ) from e
        if isinstance(e, sqlite3.Error):
            number = next((number for said, number in _SAID.items() if said in str(e)), errno.EIO)
            raise OSError(number, f"cannot write the episode log: {e}", str(self._path)) from e


class EpisodeLogWriter:
    """The log of a run, for the one process that writes it; the database is made with the first episode."""

    def __init__(self, folder: Path) -> None:
        """:param folder: ``episodes/`` of the run folder."""
        self._folder = folder
        self._db: Database | None = None
        self._unlisted = 0
        """Bytes of rows that no list has yet, unless a reader has listed them: `rewind` leaves none."""
        self._left = _UNLISTED
        """How many are left to readers."""
        self.failed = False
        """Whether the caller was told that the log cannot be written."""
        self._telling = _Telling(self, folder / DATABASE)

    def episode(self, step: int, episode: Episode) -> None:
        """Log an episode that ended.

        :raises OSError: the database cannot be written.
        :raises ValueError: a value does not fit its column.
        """
        row = episode_row(step, episode, time.time())
        with self._telling:
            db = self._db or self._open()
            self._unlisted += db.add_episode(row)
            if self._unlisted >= self._left:
                self._left = _AT_ONCE
                self._unlisted -= list_some(db) or self._unlisted

    def credit(self, step: int, samples: Sequence[Sample], trainer: Mapping[int, Any] | None = None) -> None:
        """Log what a step's samples were credited with, instead of what was said of their episodes in it; raises as
        `episode`.

        :param trainer: place in ``samples`` -> the trainer's log-probabilities, float32 [trained tokens].
        """
        rows = credit_rows(step, samples, trainer or {})
        with self._telling, (self._db or self._open()).begin() as db:
            add_credit(db, rows)

    def close(self) -> None:
        """Let go of the database; its write-ahead log is sorted in, unless somebody still reads it."""
        if self._db is not None:
            self._db.close()
            self._db = None

    def _open(self) -> Database:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._db = connect(self._folder)
        return self._db


def connect(folder: Path) -> Database:
    """Open or make the database in ``folder``, with what an ASTuner that wrote format 1 left there.

    :raises sqlite3.Error: it cannot be opened, made, or written.
    :raises DataError: it is not the episode log's, or of a newer format.
    """
    path = folder / DATABASE
    _convert_older(folder)
    aside = set_aside(foreign_files(path))
    db = _open(path)
    try:
        db.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT}")
        check(db, path)
        db.execute("PRAGMA synchronous = NORMAL")  # whole after a power cut; waits for the disk now and then only
        if _version(db) < FORMAT:
            db.execute("PRAGMA journal_mode = WAL")
            make_tables(db)
        db.executemany("INSERT INTO problems VALUES (?)", [(text,) for text in aside])
    except BaseException:
        db.close()
        raise
    return db


def _open(path: Path, how: str = "mode=rwc") -> Database:
    """Open a database, and note that this process has it open.

    :param how: Parameters of SQLite's URI.
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
    """Open the database in ``folder``, which may be one that cannot be written; `list_all` is the reader's to call.

    :raises sqlite3.Error: it cannot be opened.
    :raises DataError: there is none, it is not the episode log's, or of a newer format.
    """
    path = folder / DATABASE
    with suppress(OSError):  # it cannot be written there
        _convert_older(folder)
    if not path.exists():
        if format1.is_there(folder):  # or an older ASTuner still writes it
            db = make_temporary()
            _copy_older(folder, db)
            return db
        raise DataError(
            f"there is no episode log in {folder}: no episode has ended yet, or the run was made with "
            "astuner.trainer_common.save_tokens=false, or by an ASTuner that wrote none"
        )
    alone = "immutable=1"  # also where SQLite's own files beside it can be made by nobody
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
    raise AssertionError("the last way returns or raises")


def check(db: sqlite3.Connection, path: Path) -> None:
    """
    :raises DataError: the database is not the episode log's, or of a newer format.
    :raises sqlite3.Error: it is no database, or a damaged one.
    """
    whose = db.execute("PRAGMA application_id").fetchone()[0]
    version = _version(db)
    empty = not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if whose != _APPLICATION and not empty:
        raise DataError(f"{path} was not written by ASTuner; move it out of the run folder")
    if version > FORMAT:
        raise DataError(
            f"{path} has format {version} of the episode log, and this ASTuner reads formats up to {FORMAT}: "
            "pip install --upgrade astuner-record"
        )
    if db.execute("SELECT 1 FROM sqlite_master WHERE type IN ('trigger', 'view')").fetchone():
        raise DataError(f"{path} has triggers or views, which ASTuner makes none of: what they do is not looked at")


def _version(db: sqlite3.Connection) -> int:
    """0: it has no tables yet."""
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def make_tables(db: Database) -> None:
    """Those that are not there yet: of format 2 is what it has."""
    db.executescript(_TABLES.format(_LISTS.format(*_OF_ALL)))


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
            with db.begin():
                db.execute("CREATE TABLE IF NOT EXISTS rewinds (step INTEGER NOT NULL)")
                db.execute("INSERT INTO rewinds VALUES (?)", (step,))  # which `side_files` compares
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
        with closing(_open(temporary)) as db:
            db.execute("PRAGMA synchronous = OFF")  # it is made again, if need be
            _copy_older(folder, db)
            db.execute("PRAGMA journal_mode = WAL")
        if not path.exists():  # somebody else was faster
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def make_temporary() -> Database:
    """An empty log for a reader, in memory or where SQLite puts what is too large for it."""
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
    again = db.execute(  # the older ones of episodes that were drawn again, and whose newer ones are forgotten
        "SELECT max(id), row FROM data WHERE episode_id NOT IN (SELECT episode_id FROM episodes) GROUP BY episode_id"
    )
    listed = [(id_, *_facts(db.unpack(frame))[0]) for id_, frame in again.fetchall()]  # their words are there still
    db.executemany(_LIST.format("main.episodes"), listed)


def list_all(db: Database) -> None:
    """Bring the lists of a reader up to date; of what the database itself does not list, it has its own."""
    while list_some(db, _OF_READERS):
        pass


def list_some(db: Database, into: tuple[str, str] = _OF_ALL) -> int:
    """Enter the oldest rows that are in no list yet; how many bytes, 0 where all are listed."""
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
        with db.begin() if into == _OF_ALL else db:  # who only reads locks nothing
            _list(db, found, into)
    return size


def _list(db: sqlite3.Connection, found: Iterable[tuple[Any, ...]], into: tuple[str, str] = _OF_ALL) -> None:
    """:param found: id, facts and text of each."""
    for id_, facts, said in found:
        db.execute(_LIST.format(into[0]), (id_, *facts))
        db.execute(f"INSERT INTO {into[1]} (rowid, body) VALUES (?, ?)", (id_, said))


def add_credit(db: Database, rows: Sequence[Sequence[Any]]) -> None:
    """Store the credit of samples instead of what their episodes have in that step; the caller has begun a transaction.

    :param rows: of `CREDITS`.
    """
    try:
        db.executemany(_CREDIT, rows)
    except (sqlite3.IntegrityError, UnicodeEncodeError):  # some are there, or half a character is to be spelled out
        made = [(*fitted(dict(zip(CREDIT, row, strict=True)), CREDIT).values(),) for row in rows]
        db.executemany("DELETE FROM credit WHERE step = ? AND episode_id = ?", {row[:2] for row in made})
        db.executemany(_CREDIT, made)


def _facts(row: Row) -> tuple[tuple[Any, ...], str]:
    """What lists need of a row, whose numbers may be packed, and what is to be searched in it.

    A reader goes through all of ``episodes`` in well under a second, so no column but the name has an index: each would
    cost every episode a page of 4 KiB in the write-ahead log.
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
    return facts, _words(_storable(said[:TEXT_LIMIT]))


def shown(row: Row) -> tuple[Any, ...]:
    """The values of `FACTS`."""
    return (*(row[name][:_QUERY] if name == "query" else row[name] for name in FACTS),)


def parsed(text: str | bytes) -> Any:
    """What JSON holds, as `json.loads` has it but for integers of more than 64 bits."""
    import orjson

    try:
        return orjson.loads(text)  # several times as fast
    except ValueError:  # half a character, or what Python's own writes of no number
        return json.loads(text)


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
