"""Opens an episode log for reading, and where it is damaged, what of it is whole; says what is not.

Invariant: an episode is read as it was written, or named as lost; it is never changed.  A row carries a checksum (an
older ASTuner's does not: of it the form alone can be checked).
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sqlite3
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import typer

from astuner import RunDir
from astuner.contracts.errors import DataError
from astuner_record.episode_log import store
from astuner_record.episode_log.rows import CREDIT, fitted, read_episode
from astuner_record.episode_log.side_files import foreign_files, left_out, set_aside
from astuner_record.episode_log.store import DATABASE, Database, add_credit

_MOST = 20
"""Lost episodes, or steps, that a sentence names."""
_NAMED = "typeof(step) = 'integer' AND typeof(episode_id) = 'text'"
_CREDITED = f"SELECT DISTINCT step, episode_id FROM credit WHERE {_NAMED}"
_CREDITED_ONLY = f"{_CREDITED} AND episode_id NOT IN (SELECT episode_id FROM data) ORDER BY 1, 2"
_PAGE = 4096
"""Bytes of a page, as SQLite makes them."""


class Lost(NamedTuple):
    """An episode that the log has had, and that cannot be read."""

    step: int
    episode_id: str


def open_whole(run: Path) -> tuple[Database, Sequence[str], Sequence[Lost]]:
    """Open the log of a run folder, everything in it looked at; where it is damaged, a copy of what is whole.

    :returns: with what is wrong with it, a sentence each, and what cannot be read.
    :raises DataError: there is none, it is of a newer format or not the episode log's, or nothing of it is whole.
    """
    path = run / "episodes" / DATABASE
    foreign = left_out(foreign_files(path))
    if why := _damage(path):
        db, told, lost = _salvaged(run, why)
        return db, (*foreign, *told), lost
    db = store.connect_to_read(run / "episodes")
    problems = store.problems(db)  # of a log that an older ASTuner wrote
    lost = [Lost(*row) for row in db.execute(_CREDITED_ONLY)] if problems else []
    return db, (*foreign, *problems, *_missing(run, db, lost)), lost


def mend(run: Path) -> list[str]:
    """Put what is whole of a damaged log in its place, before a run goes on, with the damaged one beside it; what was
    done, a sentence each.

    :raises DataError: as `open_whole`; or `OSError`.
    """
    path = run / "episodes" / DATABASE
    if not path.exists():
        return []
    aside = set_aside(foreign_files(path))
    if not (why := _damage(path)):
        return aside
    db, salvaged, _ = _salvaged(run, why)
    problems = [*aside, *salvaged]
    temporary, kept = path.with_name(f".{DATABASE}.{os.getpid()}.tmp"), path.with_name(f"{DATABASE}.damaged")
    temporary.unlink(missing_ok=True)
    try:
        with closing(db):
            db.executemany("INSERT INTO main.problems VALUES (?)", [(text,) for text in problems])
            db.execute("VACUUM main INTO ?", (str(temporary),))
    except sqlite3.Error as e:
        raise OSError(errno.EIO, str(e), str(temporary)) from e
    for end in ("-wal", "-shm", ""):
        if (there := Path(f"{path}{end}")).exists():
            there.replace(f"{kept}{end}")
    temporary.replace(path)
    return [*problems, f"what is whole of it goes on in its place; the damaged one is {kept.name}"]


def end_partly(problems: Sequence[str]) -> None:
    """Say on stderr what a command left out, and end it with exit code 3: it did what was asked with what is whole."""
    for problem in problems:
        typer.echo(f"astuner: {problem}", err=True)
    if problems:
        raise typer.Exit(3)


def _damage(path: Path) -> str:
    """What is wrong with a database; "" for nothing."""
    try:
        with closing(store.connect_to_read(path.parent)) as db:
            db.execute("BEGIN")  # as it stands at one moment
            (said,) = db.execute("PRAGMA main.quick_check(1)").fetchone()
            if said != "ok":
                return str(said).splitlines()[-1]
            listed = {row[0]: row[1 : 1 + len(store.FACTS)] for row in db.execute("SELECT * FROM main.episodes")}
            for id_, name, step, frame in db.execute("SELECT id, episode_id, step, row FROM main.data"):
                row = _whole(db, name, step, frame)
                if row is None or listed.pop(id_, shown := store.shown(row)) != shown:
                    return f"the row of {name} is damaged, or its row in the list"
    except sqlite3.Error as e:
        return str(e)
    return f"{len(listed)} episodes are listed and not there" if listed else ""


def _whole(db: Database, name: str, step: int, frame: bytes) -> dict[str, Any] | None:
    """The row, if it is as it was written."""
    try:
        row, _ = db.decoded(frame)
        if not frame[4] & 4:  # it has no checksum
            read_episode(db.unpack(frame))
        return row if (row["episode_id"], row["step"]) == (name, step) else None
    except Exception:  # it is not, so anything may come of it
        return None


def _missing(run: Path, db: Database, lost: Sequence[Lost]) -> list[str]:
    """What the metrics count, and the log has not: its write-ahead log was cut off, or left behind in a copy."""
    metrics, counted = RunDir(run).metrics, dict[int, float]()
    for line in metrics.read_bytes().splitlines() if metrics.is_file() else ():
        with suppress(ValueError, TypeError, LookupError, RecursionError):  # the report says which are no rows
            row = json.loads(line)
            counted[int(row["step"])] = float(row["rollout/episodes"])
    store.list_all(db)
    found = dict(db.execute("SELECT step, count(*) FROM episodes WHERE split = 'train' GROUP BY step"))
    there, total = sum(found.values()), sum(counted.values())
    if total <= there + len(lost):
        return []
    none = _named([str(step) for step in counted if step not in found])
    said = f"the log has {there:,} of {total:,.0f} training episodes that metrics.jsonl counts"
    said += f", and none of the steps {none}" if none else ""
    return [f"{said}; was {DATABASE}-wal cut off or left behind, or save_tokens off?"]


def _named(names: list[str]) -> str:
    return ", ".join(names[:_MOST]) + (f" and {len(names) - _MOST:,} more" if len(names) > _MOST else "")


def _renew_first_page(copy: Path) -> None:
    """Give a database the first page of a new one: both have the same tables at the same pages."""
    new = copy.with_name("new")
    with closing(sqlite3.connect(new, factory=Database)) as db:
        store.make_tables(db)
    page, pages = new.read_bytes()[:_PAGE], copy.stat().st_size // _PAGE
    with copy.open("r+b") as file:
        file.write(page[:28] + pages.to_bytes(4, "big") + page[32:])


def _salvaged(run: Path, why: str) -> tuple[Database, Sequence[str], Sequence[Lost]]:
    """As `open_whole`, of a damaged database."""
    path, db = run / "episodes" / DATABASE, store.make_temporary()
    problems: list[str] = []
    try:
        with TemporaryDirectory(prefix="astuner-") as folder:
            copy = Path(folder) / DATABASE
            foreign = foreign_files(path)
            for end in ("", "-wal"):
                if (there := Path(f"{path}{end}")).is_file() and there not in foreign:
                    shutil.copyfile(there, f"{copy}{end}")
            known, lost, bad = _copy_whole(copy, db, problems)
            if known == len(lost):
                _renew_first_page(copy)
                known, lost, bad = _copy_whole(copy, db, problems)
    except OSError as e:
        raise DataError(f"{path} is damaged ({why}), and what is whole of it cannot be copied: {e}") from e
    if not known:
        raise DataError(f"{path} is no database, or a damaged one ({why}); move it out of the run folder")
    named = _named([f"{one.episode_id[:100]!r} of step {one.step}" for one in lost])
    text = f"{len(lost):,} of {known:,} episodes are lost: {named}" if lost else "no episode is known to be lost"
    text += f"; the credit of {bad:,} episodes is lost" if bad else ""
    return db, (*problems, f"{DATABASE} is damaged ({why}): {text}", *_missing(run, db, lost)), lost


def _copy_whole(copy: Path, db: Database, problems: list[str]) -> tuple[int, list[Lost], int]:
    """How many episodes are known, which are lost, and of how many of the others the credit is."""
    lost, bad = [], 0
    with closing(sqlite3.connect(copy, isolation_level=None, factory=Database)) as old, db.begin():
        old.text_factory = lambda data: data.decode("utf-8", "replace")
        list(_found(old, "PRAGMA writable_schema = ON"))  # it opens a database that is cut off, too
        db.executemany("INSERT OR REPLACE INTO main.dictionary VALUES (?, ?)", _found(old, "SELECT * FROM dictionary"))
        problems += [text for (text,) in _found(old, "SELECT text FROM problems")]
        known = {id_: one for table in ("episodes", "data") for id_, one in _rows(old, table)}
        newest = {one.episode_id: id_ for id_, one in sorted(known.items())}
        names = {row[1]: Lost(*row) for row in _found(old, _CREDITED)} | {n: known[id_] for n, id_ in newest.items()}
        for name, one in names.items():  # an older attempt does not stand in for a lost one
            row = next(_found(old, "SELECT id, episode_id, step, row FROM data WHERE id = ?", newest.get(name)), None)
            if row is None or _whole(old, *row[1:]) is None:
                lost.append(one)
                continue
            db.execute("INSERT INTO main.data VALUES (?, ?, ?, ?)", row)
            try:
                rows = old.execute(f"SELECT {', '.join(CREDIT)} FROM credit WHERE episode_id = ?", (name,)).fetchall()
                add_credit(db, [(*fitted(dict(zip(CREDIT, row, strict=True)), CREDIT).values(),) for row in rows])
            except (sqlite3.Error, ValueError):
                db.execute("DELETE FROM main.credit WHERE episode_id = ?", (name,))
                bad += 1
    return len(names), sorted(lost), bad


def _rows(db: Database, table: str) -> Iterator[tuple[int, Lost]]:
    """The ids of a table and what they are of; damaged pages are left out, whose ends are found by halving."""
    sql, at = f"SELECT id, episode_id, step FROM {table} WHERE id >= ? AND {_NAMED} ORDER BY id", 0

    def reads(id_: int) -> bool:
        return any(True for _ in _found(db, f"SELECT * FROM ({sql} LIMIT 1) UNION ALL SELECT 0, '', 0", id_))

    while True:
        for id_, name, step in _found(db, sql, at):
            yield id_, Lost(step, name)
            at = max(at, id_) + 1
        good = next((id_ for id_ in (at, *(at + (1 << n) for n in range(62))) if reads(id_)), at)
        if good == at:  # there are no more, or none that can be read
            return
        at = bisect_left(range(good), True, at + 1, key=reads)


def _found(db: Database, sql: str, *values: Any) -> Iterator[Any]:
    """The rows up to the first that cannot be read."""
    try:
        yield from db.execute(sql, values)
    except sqlite3.Error:
        return
