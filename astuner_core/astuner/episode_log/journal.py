"""Episodes that have ended and are in no batch yet, so that a process that is killed loses none of them.

A batch costs about as much for one episode as for sixty, so episodes wait for each other; while they wait, each is in
the journal of its writer: a file beside the log's, which is emptied when nothing waits any more.  The writer holds it
locked.  Whoever finds one that nobody holds makes a file of the log of it, and removes it.  Invariant: an episode is in
the journal before `Journal.add` returns, and leaves it after a batch with it is the system's.

An entry is ``<length><crc-32><pickle>``, both numbers as 4 bytes, little-endian.  It is read without any class or
function: a pickle that asks for one is refused, so a run folder from elsewhere runs nothing here.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import pickle
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

from astuner.episode_log.columns import Columns
from astuner.episode_log.rows import Row
from astuner.episode_log.schema import TOKENS, file_name, files, next_number, pyarrow, schema
from astuner.episode_log.stream import StreamFile, TornHeader
from astuner.errors import DataError

SUFFIX = ".journal"
_HEAD = struct.Struct("<II")
_SPARE = 8 * 2**20
"""Bytes of what is in a batch by now that may stay in the journal, while something else waits."""
_NOT_A_JOURNAL = (pickle.UnpicklingError, AttributeError, EOFError, ImportError, LookupError, TypeError, ValueError)
"""What comes of reading anything else, as ``pickle`` documents it, and of making columns of it."""


def entry(row: Row) -> bytes:
    """An episode's row as the journal holds it."""
    body = pickle.dumps(row, protocol=5)
    return _HEAD.pack(len(body), zlib.crc32(body)) + body


class Journal:
    """What one writer has not written into a batch yet; not for use by several threads at once."""

    def __init__(self, folder: Path) -> None:
        """:raises OSError: it cannot be made."""
        self._path = folder / f"{os.getpid()}-{time.time_ns():x}{SUFFIX}"
        self._file: io.FileIO | None = None
        self._begin(b"")

    def add(self, data: bytes) -> None:
        """Keep an `entry`.

        :raises OSError: the disk is full, or has failed.
        """
        assert self._file is not None, "closed"
        _write(self._file, data)
        self._size += len(data)

    def keep(self, waiting: Sequence[bytes]) -> None:
        """Forget all entries but these, at once or later; the others are in a batch.

        :raises OSError: as `add`.
        """
        assert self._file is not None, "closed"
        if not waiting:
            self._file.seek(0)
            self._file.truncate()
            self._size = 0
        elif self._size > 2 * sum(map(len, waiting)) + _SPARE:  # so each byte is written twice at most, in the long run
            self._begin(b"".join(waiting))

    def close(self, *, remove: bool) -> None:
        """:param remove: nothing in it is still needed; otherwise the next one who looks makes a file of it."""
        if self._file is not None:
            if remove:
                self._path.unlink()
            self._file.close()
            self._file = None

    def _begin(self, data: bytes) -> None:
        """Another file with ``data`` takes its place; it is held before anybody can find it."""
        temporary = self._path.with_name(f".{self._path.name}.tmp")
        file = open(temporary, "xb", buffering=0)  # noqa: SIM115  # closed by `close`, or when another takes its place
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write(file, data)
            temporary.replace(self._path)
        except OSError:
            file.close()
            temporary.unlink(missing_ok=True)
            raise
        if self._file is not None:
            self._file.close()
        self._file, self._size = file, len(data)


def recover(folder: Path, *, patience: float = 0.0) -> tuple[str, ...]:
    """Make files of the log of journals whose writers are gone.

    :param patience: seconds for which one that is held is waited for.
    :returns: what could not be taken over, a sentence each.
    :raises DataError: a journal is held for longer than ``patience``, if that is not 0.
    """
    problems = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            file = _held(path, patience)
        except OSError as e:
            if e.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            problems.append(
                f"{path.name}: what a killed run had not sorted in is left out, since {folder} cannot be written"
            )
            continue
        if file is not None:
            with file:
                if problem := _take_over(folder, path, file):
                    problems.append(problem)
    return tuple(problems)


def _held(path: Path, patience: float) -> io.FileIO | None:
    """The journal at ``path``, locked; None if it is its writer's, or gone."""
    until = time.monotonic() + patience
    while True:
        try:
            file = open(path, "r+b", buffering=0)  # noqa: SIM115  # the caller closes it
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.fstat(file.fileno()).st_ino == path.stat().st_ino:
                return file
        except BlockingIOError:
            pass
        except BaseException:
            file.close()
            raise
        file.close()  # a writer's, or no longer the one at this path
        if not patience:
            return None
        if time.monotonic() > until:
            raise DataError(f"{path} is held by a process that still runs: end it (`fuser {path}` says which it is)")
        time.sleep(0.05)


def _take_over(folder: Path, path: Path, file: io.FileIO) -> str:
    """Write what a held journal has and the log has not into a new file, and remove it; what is to be said, or ""."""
    try:
        rows = list(_entries(file.readall()))
        known = _known_in(folder) if rows else set()
        if new := [row for row in rows if (row["episode_id"], row["time"]) not in known]:
            _write_file(folder, new)
    except _NOT_A_JOURNAL as e:
        return f"{path.name} was not written by ASTuner ({type(e).__name__}: {e}); move it out of the run folder"
    path.unlink()
    return ""


def _entries(data: bytes) -> Iterator[Row]:
    """The rows of a journal, up to where its writer was killed; raises one of `_NOT_A_JOURNAL` where it is none."""
    at = 0
    while at + _HEAD.size <= len(data):
        length, check = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        body = data[at : at + length]
        if len(body) < length or zlib.crc32(body) != check:
            return
        at += length
        yield _Plain(io.BytesIO(body)).load()


class _Plain(pickle.Unpickler):
    """Numbers, texts and collections of them; nothing that is imported or called."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no journal of ASTuner does")


def _known_in(folder: Path) -> set[tuple[str, float]]:
    """Name and time of each episode in the log: an entry may be of a batch that was whole when its writer ended."""
    found: set[tuple[str, float]] = set()
    for path in files(folder):
        try:
            file = StreamFile(path)
        except (TornHeader, FileNotFoundError):
            continue
        try:
            if file.kind == TOKENS:
                for _, batch in file.batches():
                    found.update(zip(*(batch.column(c).to_pylist() for c in ("episode_id", "time")), strict=True))
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
            with suppress(FileExistsError):  # a run goes on meanwhile
                os.link(temporary, folder / file_name(TOKENS, next_number(folder)))
                return
    finally:
        temporary.unlink(missing_ok=True)


def _write(file: io.FileIO, data: bytes) -> None:
    """All of ``data``; where there is no room for it, the second attempt says so."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]
