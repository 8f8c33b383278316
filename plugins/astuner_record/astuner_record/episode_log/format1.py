"""Reads logs of format 1, as earlier ASTuners wrote them: Arrow streams, and journals of what was in none yet.

``tokens-*.arrows`` have a row per episode and ``credit-*.arrows`` one per sample; a file whose writer was killed may
end in a torn batch.  ``*.journal`` is ``ASTunerJ1\\n`` and then entries ``<length><crc-32><row as MessagePack>``, both
numbers as 4 bytes, little-endian; a length of 0 is the end, and its writer holds it locked.  Nothing is written here.
"""

from __future__ import annotations

import fcntl
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from astuner.contracts.errors import DataError, MissingDependency
from astuner_record.episode_log.rows import Row

_NAME = re.compile(r"(tokens|credit)-(\d+)\.arrows")
_JOURNAL = "*.journal"
_MAGIC = b"ASTunerJ1\n"
_HEAD = struct.Struct("<II")
_BATCH, _END = b"\xff" * 4, b"\xff" * 4 + bytes(4)
"""What a batch of an Arrow stream begins with, and what the stream ends with."""


def is_there(folder: Path) -> bool:
    """Whether a folder has such a log."""
    return bool(_files(folder, "tokens")) or any(folder.glob(_JOURNAL))


def is_being_written(folder: Path) -> bool:
    """Whether an older ASTuner is at it."""
    for path in folder.glob(_JOURNAL):
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    return False


def episodes(folder: Path, problems: list[str]) -> Iterator[Row]:
    """The rows of all episodes, in the order in which they ended.

    :param problems: here goes what cannot be read, a sentence each.
    :raises DataError: a file is of a newer format, or was not written by ASTuner.
    :raises MissingDependency: pyarrow is not installed.
    """
    known = set()
    for path in _files(folder, "tokens"):
        for row in _batches(path, problems):
            known.add((row["episode_id"], row["time"]))
            yield row
    for path in sorted(folder.glob(_JOURNAL)):  # an entry may be of a batch that was whole when its writer ended
        yield from (row for row in _entries(path, problems) if (row.get("episode_id"), row.get("time")) not in known)


def credit(folder: Path, problems: list[str]) -> Iterator[Row]:
    """The rows of all samples, as they were credited; as `episodes`."""
    for path in _files(folder, "credit"):
        yield from _batches(path, problems)


def _files(folder: Path, kind: str) -> list[Path]:
    """In the order in which they were written."""
    found = [(int(match[2]), path) for path in folder.glob("*.arrows") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found) if path.name.startswith(kind)]


def _batches(path: Path, problems: list[str]) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError as e:
        raise MissingDependency(f"{path} is read with pyarrow ({e}): pip install astuner-record") from None
    data = path.read_bytes()
    stream = pyarrow.BufferReader(data)
    try:
        schema = pyarrow.ipc.read_schema(stream)
    except (EOFError, OSError, ValueError) as e:  # it was begun and holds nothing yet, or its head is damaged
        if _BATCH in data[4:]:
            problems.append(f"{path.name} cannot be read ({e}), and its {len(data):,} bytes are skipped")
        return
    version = int((schema.metadata or {}).get(b"astuner.format", 0))
    if version != 1:
        what = f"has format {version} of the episode log" if version else "was not written by ASTuner"
        raise DataError(f"{path} {what}; move it out of the run folder")
    at, lost = stream.tell(), 0
    while data[at : at + len(_END)] not in (b"", _END):
        stream.seek(at)
        try:
            batch = pyarrow.ipc.read_record_batch(pyarrow.ipc.read_message(stream), schema)
            batch.validate(full=True)
            rows, end = batch.to_pylist(), stream.tell()
        except (EOFError, OSError, TypeError, ValueError, MemoryError):  # on with the next that is whole
            rows, begin = [], data.find(_BATCH, at + 1)
            end = begin if begin > 0 else len(data)
            lost += end - at
        yield from rows
        at = end
    if lost:
        problems.append(f"{path.name}: {lost:,} bytes are not a whole batch, and are skipped with what was in them")


def _entries(path: Path, problems: list[str]) -> Iterator[Row]:
    import msgspec

    data = path.read_bytes()
    if not data.startswith(_MAGIC):
        if not _MAGIC.startswith(data):  # otherwise its writer was killed at once
            problems.append(f"{path.name} was not written by ASTuner; move it out of the run folder")
        return
    at = len(_MAGIC)
    while at + _HEAD.size <= len(data):
        length, check = _HEAD.unpack_from(data, at)
        at += _HEAD.size + length
        body = data[at - length : at]
        if not length:  # the end
            return
        try:
            if len(body) < length or zlib.crc32(body) != check:
                raise ValueError("the bytes are not those that were written")
            row = msgspec.msgpack.decode(body, type=dict)
        except ValueError as e:  # msgspec's errors are
            problems.append(f"{path.name}: an episode cannot be read ({e})")
        else:
            yield row
