"""Find side files of ``episodes.sqlite`` that do not belong to it, before SQLite reads them.

SQLite treats any ``-wal`` or ``-journal`` file next to a database as its own and merges it. After a copy, a backup or a
mix-up of run folders, such a file may belong to another log or an older state, and would replace episodes. A
write-ahead log that a killed run left behind belongs to its log, and is read.

Invariant: no file is inspected while a process has the database open. Its side files are in use then, and opening and
closing a file here would release the locks that SQLite holds in this process.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import struct
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import NamedTuple
from weakref import WeakKeyDictionary

_HEADER = 32
"""Bytes of a write-ahead log before its first page."""
_MAGIC = {0x377F0682: "<", 0x377F0683: ">"}
"""First number of a write-ahead log -> byte order of its checksums."""
_SQLITE = b"SQLite format 3\0"
_WAL_MODE = b"\x02\x02"
SIDES = ("-wal", "-journal", "-shm")
_SHARED_LOCK = 0x40000002, 510
"""Start and length of the bytes that each connection locks (SQLite's file format, "File Locking")."""
_open_here: WeakKeyDictionary[sqlite3.Connection, str] = WeakKeyDictionary()
"""Connections of this process -> the file they have open."""
_of_open_here = threading.Lock()


class Facts(NamedTuple):
    """Facts that identify a log and its state."""

    dictionary: bytes | None
    rewinds: int
    """Number of rewinds, each of which deletes the newest rows."""
    newest: int
    """ID of the newest row, which is the time at which it was written; 0 without rows."""


def opened(db: sqlite3.Connection, path: Path) -> None:
    """Register a database as open in this process, until `closed` or until the connection is garbage-collected."""
    with _of_open_here:
        _open_here[db] = os.path.realpath(path)


def closed(db: sqlite3.Connection) -> None:
    """Register a connection as closed."""
    with _of_open_here:
        _open_here.pop(db, None)


def foreign_files(path: Path) -> dict[Path, str]:
    """Return the side files of a database that do not belong to it, with reasons. Open no file for writing.

    The result is empty while a process has the database open.
    """
    found: dict[Path, str] = {}
    with _of_open_here:
        is_open_here = os.path.realpath(path) in _open_here.values()
    if is_open_here or _is_open_elsewhere(path):
        return found
    for side in SIDES:
        file = Path(f"{path}{side}")
        if file.is_symlink() or (file.exists() and not file.is_file()):
            found[file] = "it is a link or a folder"
    wal, journal = Path(f"{path}-wal"), Path(f"{path}-journal")
    if path.is_file() and not path.is_symlink():
        if journal not in found and (why := _foreign_journal(path, journal)):
            found[journal] = why
        if wal not in found and (why := _foreign_header(path, wal) or ("" if found else _contradiction(path, wal))):
            found[wal] = why
    return found


def _is_open_elsewhere(path: Path) -> bool:
    """Return whether another process holds the lock that every SQLite connection takes. Works on Linux only."""
    if sys.platform != "linux" or not path.is_file():
        return False
    layout = "hhqqi"  # struct flock: type, whence, start, length, pid
    asked = struct.pack(layout, fcntl.F_WRLCK, os.SEEK_SET, *_SHARED_LOCK, 0)
    try:
        with path.open("rb") as file:
            kind, *_ = struct.unpack(layout, fcntl.fcntl(file, fcntl.F_GETLK, asked))
    except OSError:  # the file system does not support locks
        return False
    return bool(kind != fcntl.F_UNLCK)


def set_aside(files: dict[Path, str]) -> list[str]:
    """Rename files so that SQLite does not read them, and return a message for each.

    :raises OSError: A file cannot be renamed.
    """
    told = []
    for file, why in files.items():
        number = next(n for n in range(1, 10**6) if not _exists(file.with_name(f"{file.name}.foreign-{n}")))
        kept = file.with_name(f"{file.name}.foreign-{number}")
        file.rename(kept)
        told.append(f"{file.name} does not belong to the episode log ({why}); renamed to {kept.name} and not read")
    return told


def left_out(files: dict[Path, str]) -> list[str]:
    """Return a message for each file that a reader skips."""
    return [
        f"{file.name} does not belong to the episode log ({why}) and is not read; run: mv {file} {file}.foreign"
        for file, why in files.items()
    ]


def open_alone(path: Path) -> sqlite3.Connection:
    """Open a database read-only, without its side files."""
    return sqlite3.connect(f"{path.absolute().as_uri()}?immutable=1", uri=True, isolation_level=None)


def _exists(path: Path) -> bool:
    return path.exists() or path.is_symlink()


def _page_size(header: bytes) -> int:
    (size,) = struct.unpack(">H", header[16:18])
    return 65536 if size == 1 else int(size)


def _head(path: Path, size: int) -> bytes:
    with path.open("rb") as file:
        return file.read(size)


def _foreign_journal(path: Path, journal: Path) -> str:
    """Return why a rollback journal is foreign. A finished episode log uses a write-ahead log and has no journal."""
    if not journal.is_file() or journal.stat().st_size == 0:
        return ""
    header = _head(path, 100)
    is_made = header.startswith(_SQLITE) and header[18:20] == _WAL_MODE and path.stat().st_size > _page_size(header)
    return "the log has no rollback journal" if is_made else ""


def _foreign_header(path: Path, wal: Path) -> str:
    if not wal.is_file() or wal.stat().st_size <= _HEADER:
        return ""
    header, own = _head(wal, _HEADER), _head(path, 100)
    magic, _, page_size, *_ = struct.unpack(">4I", header[:16])
    if magic not in _MAGIC:
        return "it is not a write-ahead log"
    if own.startswith(_SQLITE) and page_size != _page_size(own):
        return f"its pages have {page_size} bytes"
    if _checksum(header[:24], _MAGIC[magic]) != struct.unpack(">2I", header[24:]):
        return "its header is damaged"
    return ""


def _checksum(data: bytes, order: str) -> tuple[int, int]:
    """Return the checksum of SQLite's file format, 4.3."""
    first = second = 0
    numbers = struct.unpack(f"{order}{len(data) // 4}I", data)
    for even, odd in zip(numbers[::2], numbers[1::2], strict=True):
        first = (first + even + second) & 0xFFFFFFFF
        second = (second + odd + first) & 0xFFFFFFFF
    return first, second


def _contradiction(path: Path, wal: Path) -> str:
    """Return why a write-ahead log cannot belong to a database: different dictionary, or an older state."""
    if not wal.is_file() or wal.stat().st_size <= _HEADER:
        return ""
    try:
        with closing(open_alone(path)) as alone:
            before = _facts(alone)
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=30)) as merged:
            after = _facts(merged)
    except sqlite3.Error as e:
        unread = any(text in str(e) for text in ("unable to open", "readonly", "locked"))
        return "" if unread else _spoils(path)
    if before.dictionary is not None and before.dictionary != after.dictionary:
        return "it belongs to another log"
    if (after.rewinds, after.newest) < (before.rewinds, before.newest):
        return "it is older than the log"
    return ""


def _spoils(path: Path) -> str:
    """Return why a write-ahead log is skipped if the database is readable without it only."""
    try:
        with closing(open_alone(path)) as alone:
            sound = alone.execute("PRAGMA quick_check(1)").fetchone() == ("ok",) and _facts(alone).newest
    except sqlite3.Error:
        return ""
    return "the log is unreadable with it" if sound else ""


def _facts(db: sqlite3.Connection) -> Facts:
    dictionary = db.execute("SELECT content FROM dictionary").fetchone()
    (newest,) = db.execute("SELECT ifnull(max(id), 0) FROM data").fetchone()
    counts = db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'rewinds'").fetchone()[0]
    rewinds = db.execute("SELECT count(*) FROM rewinds").fetchone()[0] if counts else 0
    return Facts(dictionary=dictionary and bytes(dictionary[0]), rewinds=int(rewinds), newest=int(newest))
