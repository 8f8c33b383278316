r"""Read logs of format 1, which older ASTuner versions wrote: Arrow streams, and journals of unflushed rows.

``tokens-*.arrows`` have one row per episode and ``credit-*.arrows`` one per sample. A file whose writer was killed may
end in an incomplete batch. ``*.journal`` is ``ASTunerJ1\n`` and then entries ``<length><crc-32><row as MessagePack>``
with 4-byte little-endian numbers. A length of 0 marks the end, and the writer holds a lock. This module writes nothing.
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
"""First bytes of a batch in an Arrow stream, and the end of a stream."""


def is_there(folder: Path) -> bool:
    """Return whether a folder contains a log of format 1."""
    return bool(_files(folder, "tokens")) or any(folder.glob(_JOURNAL))


def is_being_written(folder: Path) -> bool:
    """Return whether an older ASTuner is writing the log."""
    for path in folder.glob(_JOURNAL):
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    return False


def episodes(folder: Path, problems: list[str]) -> Iterator[Row]:
    """Yield the rows of all episodes, in the order in which they ended.

    :param problems: Receives a message for each unreadable part.
    :raises DataError: A file has a newer format, or was not written by ASTuner.
    :raises MissingDependency: pyarrow is not installed.
    """
    known = set()
    for path in _files(folder, "tokens"):
        for row in _batches(path, problems):
            known.add((row["episode_id"], row["time"]))
            yield row
    for path in sorted(folder.glob(_JOURNAL)):  # entries may already be in a batch
        yield from (row for row in _entries(path, problems) if (row.get("episode_id"), row.get("time")) not in known)


def credit(folder: Path, problems: list[str]) -> Iterator[Row]:
    """Yield the rows of all credited samples; parameters and errors as for `episodes`."""
    for path in _files(folder, "credit"):
        yield from _batches(path, problems)


def _files(folder: Path, kind: str) -> list[Path]:
    """Return the files in the order in which they were written."""
    found = [(int(match[2]), path) for path in folder.glob("*.arrows") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found) if path.name.startswith(kind)]


def _batches(path: Path, problems: list[str]) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError as e:
        raise MissingDependency(f"Reading {path} requires pyarrow ({e}): pip install astuner-record") from None
    data = path.read_bytes()
    stream = pyarrow.BufferReader(data)
    try:
        schema = pyarrow.ipc.read_schema(stream)
    except (EOFError, OSError, ValueError) as e:  # the file is empty, or its header is damaged
        if _BATCH in data[4:]:
            problems.append(f"{path.name} cannot be read ({e}); {len(data):,} bytes are skipped")
        return
    version = int((schema.metadata or {}).get(b"astuner.format", 0))
    if version != 1:
        what = f"has format {version} of the episode log" if version else "was not written by ASTuner"
        raise DataError(f"{path} {what}. Move it out of the run folder.")
    at, lost = stream.tell(), 0
    while data[at : at + len(_END)] not in (b"", _END):
        stream.seek(at)
        try:
            batch = pyarrow.ipc.read_record_batch(pyarrow.ipc.read_message(stream), schema)
            batch.validate(full=True)
            rows, end = batch.to_pylist(), stream.tell()
        except (EOFError, OSError, TypeError, ValueError, MemoryError):  # skip to the next complete batch
            rows, begin = [], data.find(_BATCH, at + 1)
            end = begin if begin > 0 else len(data)
            lost += end - at
        yield from rows
        at = end
    if lost:
        problems.append(f"{path.name}: {lost:,} bytes are not a complete batch and are skipped")


def _entries(path: Path, problems: list[str]) -> Iterator[Row]:
    import msgspec

    data = path.read_bytes()
    if not data.startswith(_MAGIC):
        if not _MAGIC.startswith(data):  # a prefix means that the writer was killed while it created the file
            problems.append(f"{path.name} was not written by ASTuner; move it out of the run folder")
        return
    at = len(_MAGIC)
    while at + _HEAD.size <= len(data):
        length, check = _HEAD.unpack_from(data, at)
        at += _HEAD.size + length
        body = data[at - length : at]
        if not length:  # end marker
            return
        try:
            if len(body) < length or zlib.crc32(body) != check:
                raise ValueError("checksum mismatch")
            row = msgspec.msgpack.decode(body, type=dict)
        except ValueError as e:  # includes msgspec's errors
            problems.append(f"{path.name}: an episode cannot be read ({e})")
        else:
            yield row
