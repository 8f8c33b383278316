"""Episodes that have ended and are in no batch yet, so that a process that is killed loses none of them.

A batch costs about as much for one episode as for sixty, so episodes wait for each other; while they wait, each is in
the journal of its writer: a file beside the log's, which is emptied when nothing waits any more.  The writer holds it
locked.  Whoever finds one that nobody holds makes a file of the log of it, and removes it.  Invariant: an episode is in
the journal before `Journal.add` returns, and leaves it after a batch with it is the system's.

A journal is `MAGIC` and then entries: ``<length><crc-32><row as MessagePack>``, both numbers as 4 bytes, little-endian.
MessagePack holds plain values alone, so a run folder from elsewhere runs nothing here.  One entry that cannot be read
costs no other.  A length of 0 is the end.

The writer has it in its memory: a system call for each episode would hand Python's lock to whoever trains meanwhile,
and then wait for it.  So the file's blocks are written before they are used, or a full disk would end the process.
"""

from __future__ import annotations

import errno
import fcntl
import io
import math
import mmap
import os
import struct
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from astuner_record.episode_log.columns import Columns
from astuner_record.episode_log.rows import Row, plain
from astuner_record.episode_log.schema import TOKENS, file_name, files, next_number, pyarrow, schema
from astuner_record.episode_log.stream import StreamFile, TornHeader

SUFFIX = ".journal"
MAGIC = b"ASTunerJ1\n"
_HEAD = struct.Struct("<II")
_END = bytes(_HEAD.size)
_ROOM = 2**16
"""Bytes of a journal, at least."""
_CLOCKS_DIFFER = 600.0
"""Seconds, at most, of this machine and of one whose disk this is."""
_MOMENT = 1.0
"""Seconds in which a reader has made a file of a journal."""
_SPARE = 8 * 2**20
"""Bytes of what is in a batch by now that may stay in the journal, while something else waits."""
_UNREADABLE = (AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What comes of anything else than a row, as MessagePack or as columns."""
_MAY_BE_MISSING = {"reward", "rewards", "is_success", "output", "metrics", "started"}
_MAY_BE_MISSING_OF_TURNS = {"continues", "tools", "started", "seconds"}
"""Columns, and fields of a turn, that may be null."""


def entry(row: Row) -> bytes:
    """A row as the journal holds it; empty where it has a value of another kind: its batch may take that, or say so."""
    pack = _packer()
    try:
        try:
            body = pack(row)
        except UnicodeEncodeError:
            body = pack(_with_whole_characters(row))
    except (OverflowError, *_UNREADABLE):
        return b""
    return _HEAD.pack(len(body), zlib.crc32(body)) + body


@cache
def _packer() -> Callable[[Any], bytes]:
    import msgspec

    encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder(enc_hook=plain).encode
    return encode


def _with_whole_characters(value: Any) -> Any:
    """Half a character, which UTF-8 cannot hold, is spelled out, as `columns` does it."""
    if isinstance(value, dict):
        return {key: _with_whole_characters(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_whole_characters(v) for v in value]
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


class Journal:
    """What one writer has not written into a batch yet; not for use by several threads at once."""

    _map: mmap.mmap
    _end: int
    """Where the next entry goes."""

    def __init__(self, folder: Path) -> None:
        """:raises OSError: it cannot be made."""
        self._path = folder / f"{os.getpid()}-{time.time_ns():x}{SUFFIX}"
        self._file: io.FileIO | None = None
        self._begin(b"")

    def add(self, data: bytes) -> None:
        """Keep an `entry`.

        :raises OSError: the disk is full, or has failed.
        """
        if self._end + len(data) + len(_END) > len(self._map):
            self._begin(self._map[len(MAGIC) : self._end], more=len(data))
        at, end = self._end, self._end + len(data)
        self._map[at + _HEAD.size : end + len(_END)] = data[_HEAD.size :] + _END
        self._map[at : at + _HEAD.size] = data[: _HEAD.size]  # last: until then, the end is before it
        self._end = end

    def keep(self, waiting: Sequence[bytes]) -> None:
        """Forget all entries but these, at once or later; the others are in a batch.

        :raises OSError: as `add`.
        """
        if not waiting:
            self._end = len(MAGIC)
            self._map[self._end : self._end + len(_END)] = _END
        elif self._end > 2 * sum(map(len, waiting)) + _SPARE:  # so each byte is written twice at most, in the long run
            self._begin(b"".join(waiting))

    def close(self, *, remove: bool) -> None:
        """:param remove: nothing in it is still needed; otherwise the next one who looks makes a file of it."""
        if self._file is not None:
            if remove:
                self._path.unlink(missing_ok=True)  # whoever resumed in this very process has taken it over
            self._map.close()
            self._file.close()
            self._file = None

    def _begin(self, data: bytes, *, more: int = 0) -> None:
        """Another file with ``data`` and room for as much and ``more`` takes its place; it is held before anybody can
        find it."""
        temporary = self._path.with_name(f".{self._path.name}.tmp")
        file = open(temporary, "x+b", buffering=0)  # noqa: SIM115  # closed by `close`, or when another takes its place
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write(file, MAGIC + data + bytes(max(_ROOM, 2 * len(data) + more + len(_END))))
            room = mmap.mmap(file.fileno(), 0)
            temporary.replace(self._path)
        except OSError as e:
            file.close()
            temporary.unlink(missing_ok=True)
            if e.filename is None:  # a full disk does not say which file
                e.filename = str(self._path)
            raise
        if self._file is not None:
            self._map.close()
            self._file.close()
        self._file, self._map, self._end = file, room, len(MAGIC) + len(data)


def recover(folder: Path, *, alone: bool = False) -> tuple[str, ...]:
    """Make files of the log of journals whose writers are gone.

    :param alone: nobody writes the log, as the caller knows.  So who holds a journal just looks at the log, and will be
        done in a moment; or is a child that a killed process left behind, and is not waited for longer than that.
    :returns: what could not be taken over, a sentence each.
    """
    problems = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            file = _held(path, alone)
            if file is not None:
                with file:
                    problems += _take_over(folder, path, file)
        except OSError as e:
            problems.append(
                f"{path.name}: what a killed run had not sorted in is left out, since {folder} cannot be written "
                f"({e.strerror}); give it room and the right to write, and look again"
            )
    return tuple(problems)


def _held(path: Path, alone: bool) -> io.FileIO | None:
    """The journal at ``path``, locked; None if it is its writer's, or gone."""
    until = time.monotonic() + _MOMENT
    while True:
        try:
            file = _opened(path)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.fstat(file.fileno()).st_ino == path.stat().st_ino:
                return file
        except BlockingIOError:
            if alone and time.monotonic() > until:
                return file
        except BaseException:
            file.close()
            raise
        file.close()  # a writer's, or no longer the one at this path
        if not alone:
            return None
        time.sleep(0.05)


def _opened(path: Path) -> io.FileIO:
    try:
        return open(path, "r+b", buffering=0)
    except OSError as e:
        if e.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        return open(path, "rb", buffering=0)  # enough to find out whether it is held


def _take_over(folder: Path, path: Path, file: io.FileIO) -> list[str]:
    """Write what a held journal has and the log has not into a new file, and remove it; what is to be said of it.

    :raises OSError: the folder cannot be written; the journal is as it was.
    """
    data = file.readall()
    if not data.startswith(MAGIC):
        if MAGIC.startswith(data):  # its writer was killed at once
            path.unlink()
            return []
        return [f"{path.name} was not written by ASTuner; move it out of the run folder"]
    rows, bad = _rows(data[len(MAGIC) :])
    known = _known_in(folder, since=min(row["time"] for row in rows)) if rows else set()
    if new := [row for row in rows if (row["episode_id"], row["time"]) not in known]:
        _write_file(folder, new)
    if not bad:
        path.unlink()
        return []
    kept = path.with_suffix(".damaged")
    path.replace(kept)
    count = f"{len(bad)} of {len(rows) + len(bad)}"
    return [f"{path.name}: {count} episodes cannot be read ({bad[0]}); they are kept in {kept.name}"]


def _rows(data: bytes) -> tuple[list[Row], list[str]]:
    """The rows of entries up to where their writer was killed, and what is wrong with those that cannot be read."""
    import msgspec

    make = Columns(schema(TOKENS))
    rows, bad, at = [], [], 0
    while at + _HEAD.size <= len(data):
        length, check = _HEAD.unpack_from(data, at)
        if not length:
            break
        at += _HEAD.size
        body = data[at : at + length]
        at += length
        if len(body) < length:  # torn: it was being written
            break
        try:
            if zlib.crc32(body) != check:
                raise ValueError("the bytes are not those that were written")
            row = msgspec.msgpack.decode(body)
            make.batch([row])  # it has all columns, and they fit
            _check(row)
            rows.append(row)
        except _UNREADABLE as e:
            bad.append(f"{type(e).__name__}: {e}")
    return rows, bad


def _check(row: Row) -> None:
    """:raises ValueError: what every reader relies on is not there."""
    missing = {name for name, value in row.items() if value is None} - _MAY_BE_MISSING
    for turn in row["turns"] or ():
        missing |= {name for name, value in turn.items() if value is None} - _MAY_BE_MISSING_OF_TURNS
    if missing or not math.isfinite(row["time"]):
        raise ValueError(f"{', '.join(sorted(missing)) or 'the time'} is missing")


def _known_in(folder: Path, *, since: float) -> set[tuple[str, float]]:
    """Name and time of the episodes in files that were written after ``since``, seconds since 1970.

    An entry may be of a batch that was whole when its writer ended.
    """
    found: set[tuple[str, float]] = set()
    for path in files(folder):
        try:
            if path.stat().st_mtime < since - _CLOCKS_DIFFER:
                continue
            file = StreamFile(path)
        except (TornHeader, FileNotFoundError):
            continue
        try:
            if file.kind == TOKENS:
                for _, batch in file.columns("episode_id", "time"):
                    found.update(zip(*(column.to_pylist() for column in batch.columns), strict=True))
        finally:
            file.close()
    return found


def _write_file(folder: Path, rows: Sequence[Row]) -> None:
    """A whole file of the log, which appears at once."""
    pa, columns = pyarrow(), schema(TOKENS)
    make = Columns(columns)
    temporary = folder / f".{os.getpid()}-{time.time_ns():x}.arrows.tmp"
    try:
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        with temporary.open("xb") as out, pa.ipc.new_stream(out, columns, options=options) as stream:
            for _, of_step in groupby(rows, key=lambda row: row["step"]):  # all rows of a batch are of one step
                stream.write_batch(make.batch(list(of_step)))
        while True:
            final = folder / file_name(TOKENS, next_number(folder))
            with suppress(FileExistsError):  # a run goes on meanwhile
                final.open("xb").close()  # an empty file is none of the log's, and keeps the name
                temporary.replace(final)
                return
    finally:
        temporary.unlink(missing_ok=True)


def _write(file: io.FileIO, data: bytes) -> None:
    """All of ``data``; where there is no room for it, the second attempt says so."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]
