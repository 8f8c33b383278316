"""Rows of Python values as an Arrow batch, built from buffers.

`pyarrow.array` does this too, with the same result; but the first time it meets Python values it imports pandas where
that is installed, which costs a short run more than all of its episodes, and it takes several times as long for the
numbers.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, chain
from operator import itemgetter
from typing import Any, TypeAlias

from astuner_record.episode_log.schema import pyarrow

_CODES = {"int32": "i", "float": "f", "double": "d"}
"""Arrow's name of a type of numbers -> `struct`'s."""

Make: TypeAlias = "Callable[[list[Any]], Any]"
"""Values, or None where there is none -> the Arrow array of them."""


class Columns:
    """Makes batches of one schema: of numbers, text, flags, lists, and structs that are never null."""

    def __init__(self, schema: Any) -> None:
        self._pa = pyarrow()
        self._schema = schema
        self._make = [(field.name, itemgetter(field.name), self._maker(field.type)) for field in schema]

    def batch(self, rows: Sequence[Mapping[str, Any]]) -> Any:
        """A record batch with a row for each of ``rows``, which have every column.

        :raises ValueError: a value does not fit its column; names the column.
        """
        arrays = [_named(name, make, list(map(get, rows))) for name, get, make in self._make]
        return self._pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _maker(self, kind: Any) -> Make:
        types = self._pa.types
        if types.is_struct(kind):
            return self._struct(kind)
        if types.is_list(kind):
            return self._list(kind)
        if types.is_string(kind):
            return self._text(kind)
        return self._flags(kind) if types.is_boolean(kind) else self._numbers(kind)

    def _struct(self, kind: Any) -> Make:
        make = [(field.name, itemgetter(field.name), self._maker(field.type)) for field in kind]
        array, empty = self._pa.Array.from_buffers, self._pa.nulls(0, kind)

        def of(values: list[Any]) -> Any:
            if not values:
                return empty
            children = [_named(name, m, list(map(get, values))) for name, get, m in make]
            return array(kind, len(values), [None], 0, children=children)

        return of

    def _list(self, kind: Any) -> Make:
        inner, array, buffer = kind.value_type, self._pa.Array.from_buffers, self._pa.py_buffer
        code, make = _CODES.get(str(inner)), self._maker(inner)

        def of(values: list[Any]) -> Any:
            validity, nulls = None, 0
            try:
                lengths = list(map(len, values))
            except TypeError:  # some have none
                validity, nulls = self._validity(values)
                values = [() if v is None else v for v in values]
                lengths = list(map(len, values))
            if code is None:
                inside = make(list(chain.from_iterable(values)))
            else:
                inside = array(inner, sum(lengths), [None, buffer(_packed(values, code))], 0)
            return array(kind, len(values), [validity, buffer(_offsets(lengths))], nulls, children=[inside])

        return of

    def _text(self, kind: Any) -> Make:
        array, buffer = self._pa.Array.from_buffers, self._pa.py_buffer

        def of(values: list[Any]) -> Any:
            validity, nulls = None, 0
            try:
                text = "".join(values)
            except TypeError:  # some have none
                validity, nulls = self._validity(values)
                values = ["" if v is None else v for v in values]
                text = "".join(values)
            if text.isascii():
                data, lengths = text.encode(), map(len, values)
            else:  # half a surrogate, which UTF-8 cannot hold, is spelled out
                texts = [v.encode("utf-8", "backslashreplace") for v in values]
                data, lengths = b"".join(texts), map(len, texts)
            return array(kind, len(values), [validity, buffer(_offsets(lengths)), buffer(data)], nulls)

        return of

    def _numbers(self, kind: Any) -> Make:
        code, array, buffer = _CODES[str(kind)], self._pa.Array.from_buffers, self._pa.py_buffer

        def of(values: list[Any]) -> Any:
            layout = f"{len(values)}{code}"
            try:
                data, validity, nulls = struct.pack(layout, *values), None, 0
            except struct.error:  # some have none, or it does not fit
                validity, nulls = self._validity(values)
                data = struct.pack(layout, *[0 if v is None else v for v in values])
            return array(kind, len(values), [validity, buffer(data)], nulls)

        return of

    def _flags(self, kind: Any) -> Make:
        def of(values: list[Any]) -> Any:
            validity, nulls = self._validity(values)
            return self._pa.Array.from_buffers(kind, len(values), [validity, self._bits(values)], nulls)

        return of

    def _validity(self, values: list[Any]) -> tuple[Any, int]:
        """The bitmap of what is there, unless everything is, and how many are not."""
        there = [v is not None for v in values]
        return (None, 0) if all(there) else (self._bits(there), there.count(False))

    def _bits(self, flags: Sequence[Any]) -> Any:
        """A bit each, the lowest of a byte first."""
        bits = int("".join(["1" if flag else "0" for flag in reversed(flags)]) or "0", 2)
        return self._pa.py_buffer(bits.to_bytes((len(flags) + 7) // 8, "little"))


def _named(name: str, make: Make, values: list[Any]) -> Any:
    try:
        return make(values)
    except (TypeError, ValueError, AttributeError, struct.error) as e:
        raise ValueError(f"{name}: {e}") from e


def _packed(lists: list[Any], code: str) -> bytes:
    """The bytes of all numbers in lists and tuples, or in numpy arrays of that very type."""
    if all(isinstance(some, (tuple, list)) for some in lists):
        numbers = list(chain.from_iterable(lists))
        return struct.pack(f"{len(numbers)}{code}", *numbers)
    for array in (some for some in lists if len(some)):
        if memoryview(array).format != code:
            raise TypeError(f"an array of {memoryview(array).format!r} where {code!r} is written")
    return b"".join([array for array in lists if len(array)])


def _offsets(lengths: Iterable[int]) -> bytes:
    ends = list(accumulate(lengths, initial=0))
    return struct.pack(f"{len(ends)}i", *ends)
