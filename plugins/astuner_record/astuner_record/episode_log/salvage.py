"""Open an episode log for reading. If it is damaged, recover its intact parts and report the rest.

Invariant: an episode is read exactly as written, or reported as lost. Rows carry a checksum; rows of older
ASTuner versions have none, so only their structure can be checked.
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
"""Maximum number of lost episodes or steps that a message names."""
_NAMED = "typeof(step) = 'integer' AND typeof(episode_id) = 'text'"
_CREDITED = f"SELECT DISTINCT step, episode_id FROM credit WHERE {_NAMED}"
_CREDITED_ONLY = f"{_CREDITED} AND episode_id NOT IN (SELECT episode_id FROM data) ORDER BY 1, 2"
_PAGE = 4096
"""Bytes of a database page, SQLite's default."""


class Lost(NamedTuple):
    """An episode that was in the log and cannot be read."""

    step: int
    episode_id: str


def open_whole(run: Path) -> tuple[Database, Sequence[str], Sequence[Lost]]:
    """Open and verify the log of a run folder. If it is damaged, return a copy of its intact parts.

    :returns: The database, a message for each problem, and the lost episodes.
    :raises DataError: The log is missing, has a newer format, is not an episode log, or has no intact part.
    """
    path = run / "episodes" / DATABASE
    foreign = left_out(foreign_files(path))
    if why := _damage(path):
        db, told, lost = _salvaged(run, why)
        return db, (*foreign, *told), lost
    db = store.connect_to_read(run / "episodes")
    problems = store.problems(db)  # of a log converted from an older format
    lost = [Lost(*row) for row in db.execute(_CREDITED_ONLY)] if problems else []
    return db, (*foreign, *problems, *_missing(run, db, lost)), lost


def mend(run: Path) -> list[str]:
    """Replace a damaged log by its intact parts before a run continues, and keep the damaged log next to it.

    :returns: A message for each action.
    :raises DataError: As `open_whole`.
    :raises OSError: The log cannot be written.
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
    return [*problems, f"the run continues with its intact parts; the damaged log is now {kept.name}"]


def end_partly(problems: Sequence[str]) -> None:
    """Print what a command skipped to stderr and exit with code 3, if there are problems."""
    for problem in problems:
        typer.echo(f"astuner: {problem}", err=True)
    if problems:
        raise typer.Exit(3)


def _damage(path: Path) -> str:
    """Return what is wrong with a database, or an empty string."""
    try:
        with closing(store.connect_to_read(path.parent)) as db:
            db.execute("BEGIN")  # a consistent snapshot
            (said,) = db.execute("PRAGMA main.quick_check(1)").fetchone()
            if said != "ok":
                return str(said).splitlines()[-1]
            listed = {row[0]: row[1 : 1 + len(store.FACTS)] for row in db.execute("SELECT * FROM main.episodes")}
            for id_, name, step, frame in db.execute("SELECT id, episode_id, step, row FROM main.data"):
                row = _whole(db, name, step, frame)
                if row is None or listed.pop(id_, shown := store.shown(row)) != shown:
                    return f"the row of {name} or its entry in the list is damaged"
    except sqlite3.Error as e:
        return str(e)
    return f"{len(listed)} listed episodes are missing" if listed else ""


def _whole(db: Database, name: str, step: int, frame: bytes) -> dict[str, Any] | None:
    """Return the row if it is intact, otherwise None."""
    try:
        row, _ = db.decoded(frame)
        if not frame[4] & 4:  # no checksum
            read_episode(db.unpack(frame))
        return row if (row["episode_id"], row["step"]) == (name, step) else None
    except Exception:  # decoding damaged bytes can raise anything
        return None


def _missing(run: Path, db: Database, lost: Sequence[Lost]) -> list[str]:
    """Return a message if metrics.jsonl counts more episodes, as after a truncated or missing write-ahead log."""
    metrics, counted = RunDir(run).metrics, dict[int, float]()
    for line in metrics.read_bytes().splitlines() if metrics.is_file() else ():
        with suppress(ValueError, TypeError, LookupError, RecursionError):  # the report lists malformed rows
            row = json.loads(line)
            counted[int(row["step"])] = float(row["rollout/episodes"])
    store.list_all(db)
    found = dict(db.execute("SELECT step, count(*) FROM episodes WHERE split = 'train' GROUP BY step"))
    there, total = sum(found.values()), sum(counted.values())
    if total <= there + len(lost):
        return []
    none = _named([str(step) for step in counted if step not in found])
    said = f"the log contains {there:,} of {total:,.0f} training episodes counted in metrics.jsonl"
    said += f", and none of steps {none}" if none else ""
    return [f"{said}; check whether {DATABASE}-wal is truncated or missing, or save_tokens was off"]


def _named(names: list[str]) -> str:
    return ", ".join(names[:_MOST]) + (f" and {len(names) - _MOST:,} more" if len(names) > _MOST else "")


def _renew_first_page(copy: Path) -> None:
    """Copy the first page of a new database, which has the same tables at the same pages, into a damaged one."""
    new = copy.with_name("new")
    with closing(sqlite3.connect(new, factory=Database)) as db:
        store.make_tables(db)
    page, pages = new.read_bytes()[:_PAGE], copy.stat().st_size // _PAGE
    with copy.open("r+b") as file:
        file.write(page[:28] + pages.to_bytes(4, "big") + page[32:])


def _salvaged(run: Path, why: str) -> tuple[Database, Sequence[str], Sequence[Lost]]:
    """Open a damaged database as `open_whole` does."""
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
        raise DataError(f"{path} is damaged ({why}), and its intact parts cannot be copied: {e}") from e
    if not known:
        raise DataError(f"{path} is not a database, or is damaged ({why}). Move it out of the run folder.")
    named = _named([f"{one.episode_id[:100]!r} of step {one.step}" for one in lost])
    text = f"{len(lost):,} of {known:,} episodes are lost: {named}" if lost else "no known episode is lost"
    text += f"; the credit of {bad:,} episodes is lost" if bad else ""
    return db, (*problems, f"{DATABASE} is damaged ({why}): {text}", *_missing(run, db, lost)), lost


def _copy_whole(copy: Path, db: Database, problems: list[str]) -> tuple[int, list[Lost], int]:
    """Return the numbers of known episodes, the lost episodes, and the number of others with lost credit."""
    lost, bad = [], 0
    with closing(sqlite3.connect(copy, isolation_level=None, factory=Database)) as old, db.begin():
        old.text_factory = lambda data: data.decode("utf-8", "replace")
        list(_found(old, "PRAGMA writable_schema = ON"))  # opens truncated databases too
        db.executemany("INSERT OR REPLACE INTO main.dictionary VALUES (?, ?)", _found(old, "SELECT * FROM dictionary"))
        problems += [text for (text,) in _found(old, "SELECT text FROM problems")]
        known = {id_: one for table in ("episodes", "data") for id_, one in _rows(old, table)}
        newest = {one.episode_id: id_ for id_, one in sorted(known.items())}
        names = {row[1]: Lost(*row) for row in _found(old, _CREDITED)} | {n: known[id_] for n, id_ in newest.items()}
        for name, one in names.items():  # an older attempt does not replace a lost one
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
    """Yield the IDs and episodes of a table, skipping damaged pages, whose ends are found by bisection."""
    sql, at = f"SELECT id, episode_id, step FROM {table} WHERE id >= ? AND {_NAMED} ORDER BY id", 0

    def reads(id_: int) -> bool:
        return any(True for _ in _found(db, f"SELECT * FROM ({sql} LIMIT 1) UNION ALL SELECT 0, '', 0", id_))

    while True:
        for id_, name, step in _found(db, sql, at):
            yield id_, Lost(step, name)
            at = max(at, id_) + 1
        good = next((id_ for id_ in (at, *(at + (1 << n) for n in range(62))) if reads(id_)), at)
        if good == at:  # no further readable rows
            return
        at = bisect_left(range(good), True, at + 1, key=reads)


def _found(db: Database, sql: str, *values: Any) -> Iterator[Any]:
    """Yield rows up to the first unreadable one."""
    try:
        yield from db.execute(sql, values)
    except sqlite3.Error:
        return
