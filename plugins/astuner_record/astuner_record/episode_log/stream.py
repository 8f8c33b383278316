"""One file of the log: an Arrow IPC stream of which whole batches count, and nothing else.

A stream that is being written, or whose writer was killed, has no end mark, and its last batch may be torn; whatever
is whole before that is good.  Invariant: a place (offset, length) holds one encapsulated message with a batch, so a
batch is read alone, without those before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from astuner.contracts.errors import DataError
from astuner_record.episode_log.schema import identity, pyarrow

END = b"\xff\xff\xff\xff\x00\x00\x00\x00"
"""The end mark of a stream."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a batch is, in bytes."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length


class StreamFile:
    """Reads a file as it was when this was made; it may grow meanwhile, or be replaced."""

    def __init__(self, path: Path) -> None:
        """:raises TornHeader: there is not even a whole header in it.
        :raises DataError: it is no file of the log, or of a newer format.
        """
        self._pa = pyarrow()
        self.path = path
        try:
            self._map = self._pa.memory_map(str(path)) if path.stat().st_size else self._pa.BufferReader(b"")
            self._schema = self._pa.ipc.read_schema(self._pa.ipc.read_message(self._map))
        except (EOFError, OSError, self._pa.ArrowInvalid) as e:
            if isinstance(e, FileNotFoundError):
                raise
            raise TornHeader(f"{path}: {e}") from None
        self.start = self._map.tell()
        """Where the first batch begins."""
        self.size = self._map.size()
        self.kind, self.file_id = identity(self._schema, path)
        self.whole_until = self.start
        """The end of the last whole batch that `batches` or `steps` met."""

    def batches(self, start: int | None = None) -> Iterator[tuple[Place, Any]]:
        """The whole batches from ``start`` on, a place that `Place.end` named, with where they are."""
        at = self.whole_until = self.start if start is None else start
        while True:
            self._map.seek(at)
            try:
                message = self._pa.ipc.read_message(self._map)
            except (EOFError, OSError, self._pa.ArrowInvalid):  # the end mark, the end of the file, or a torn batch
                return
            place = Place(offset=at, length=self._map.tell() - at)
            batch = self._batch(message, place)
            at = self.whole_until = place.end
            yield place, batch

    def steps(self) -> Iterator[tuple[Place, int]]:
        """As `batches`, with the step that all rows of one are of."""
        for place, batch in self.columns("step"):
            yield place, batch.column(0)[0].as_py()

    def columns(self, *names: str) -> Iterator[tuple[Place, Any]]:
        """As `batches`, with these columns alone, in the file's order; nothing else of them is decompressed."""
        fields = [self._schema.get_field_index(name) for name in names]
        options = self._pa.ipc.IpcReadOptions(included_fields=fields)
        at = self.whole_until = self.start
        self._map.seek(0)
        stream = self._pa.ipc.open_stream(self._map, options=options)
        while True:
            try:
                batch = stream.read_next_batch()
            except StopIteration:
                return
            except (EOFError, OSError, self._pa.ArrowInvalid) as e:
                self._map.seek(at)
                try:
                    self._pa.ipc.read_message(self._map)
                except (EOFError, OSError, self._pa.ArrowInvalid):  # a torn batch
                    return
                raise self._damaged(Place(offset=at, length=0), e) from None
            place = Place(offset=at, length=self._map.tell() - at)
            at = self.whole_until = place.end
            yield place, batch

    @property
    def is_torn(self) -> bool:
        """Whether something else than an end mark follows the last whole batch that `batches` met."""
        return self._bytes(self.whole_until, self.size) not in (b"", END)

    def read(self, place: Place) -> Any:
        """The batch at a place."""
        self._map.seek(place.offset)
        try:
            message = self._pa.ipc.read_message(self._map)
        except (EOFError, OSError, self._pa.ArrowInvalid) as e:
            raise self._damaged(place, e) from None
        return self._batch(message, place)

    def raw(self, place: Place) -> bytes:
        """The bytes at a place."""
        return self._bytes(place.offset, place.end)

    def header(self, schema: Any) -> bytes:
        """The beginning of a file with ``schema``."""
        return bytes(schema.serialize())

    @property
    def schema(self) -> Any:
        return self._schema

    def close(self) -> None:
        self._map.close()

    def _bytes(self, start: int, end: int) -> bytes:
        self._map.seek(start)
        return bytes(self._map.read(end - start))

    def _batch(self, message: Any, place: Place) -> Any:
        try:
            return self._pa.ipc.read_record_batch(message, self._schema)
        except (OSError, self._pa.ArrowInvalid) as e:
            raise self._damaged(place, e) from None

    def _damaged(self, place: Place, error: Exception) -> DataError:
        return DataError(
            f"{self.path} is damaged at byte {place.offset} ({error}); move it out of the run folder to read the rest, "
            "or restore it from a copy"
        )


class TornHeader(DataError):
    """A file was begun and holds nothing yet."""
