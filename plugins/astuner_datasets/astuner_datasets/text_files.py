"""Read rows of CSV and JSON files without guessing types.

``datasets`` reads such files with Arrow and pandas, which guess a type for each column: the text ``2024-01-05`` becomes
a timestamp, ``NA`` becomes null, ``007`` becomes 7. Here ``datasets`` only locates the files, and their rows are read
without guessing: a CSV cell is text, a JSON value keeps its JSON type, and a key that a row lacks stays absent.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import Any

from astuner.contracts.errors import DataError
from astuner.contracts.rows import BadRow, parse_json

_MAX_CELL_CHARS = 2**31 - 1
_BOM = b"\xef\xbb\xbf"
_CSV_OPTIONS = {
    "sep", "delimiter", "header", "names", "column_names", "quotechar", "quoting", "escapechar", "doublequote",
    "skipinitialspace", "encoding", "encoding_errors",
}  # fmt: skip
"""Supported options of `datasets`' CSV files, from the YAML in a data set's README.md."""
_CSV_IGNORED = {
    "features", "chunksize", "engine", "memory_map", "float_precision", "keep_default_na", "na_filter",
    "mangle_dupe_cols", "verbose", "low_memory", "error_bad_lines", "warn_bad_lines", "on_bad_lines", "date_format",
}  # fmt: skip
"""Ignored options, which only affect types and speed."""


class TextFiles:
    """The splits of a data set that consists of CSV or JSON files."""

    def __init__(self, builder: Any) -> None:
        """Keep the builder's files and options.

        :param builder: The `datasets.DatasetBuilder` that located the files.
        """
        self._config = builder.config
        self._is_csv = _reads_csv(builder)
        self._base = Path(builder.base_path) if builder.base_path else Path()
        self._files: Mapping[str, Sequence[Any]] = builder.config.data_files or {}
        self._rows: dict[str, list[Any]] = {}

    @staticmethod
    def reads(builder: Any) -> bool:
        """Return whether the builder's files are CSV or JSON."""
        return _reads_csv(builder) or _reads_json(builder)

    def rows(self, split: str) -> list[Any]:
        """Return the rows of a split such as ``train`` or ``train[:100]+test``. Invalid rows are `BadRow` objects.

        :raises ValueError: The split is unknown or misspelled.
        :raises DataError: A file cannot be read.
        """
        from datasets import ReadInstruction

        parts = ReadInstruction.from_spec("+".join(self._files) if split == "all" else split)
        lengths: Mapping[str, int] = _Lengths(self)
        return [row for part in parts.to_absolute(lengths) for row in self._of(part.splitname)[part.from_ : part.to]]

    def _of(self, name: str) -> list[Any]:
        if name not in self._rows:
            read = self._csv if self._is_csv else self._json
            self._rows[name] = [row for label, path in self._local[name] for row in read(label, path)]
        return self._rows[name]

    @cached_property
    def _local(self) -> dict[str, list[tuple[str, Path]]]:
        """Local files of all splits, unpacked, each with its name in messages."""
        from datasets import DownloadConfig, DownloadManager

        manager = DownloadManager(download_config=DownloadConfig(disable_tqdm=True))
        sources = {split: list(map(str, files)) for split, files in self._files.items()}
        unpacked = manager.download_and_extract(sources)  # all splits, so that later runs need no network
        return {
            split: [
                (self._label(source), Path(file))
                for source, path in zip(files, unpacked[split], strict=True)
                for file in manager.iter_files([path])
            ]
            for split, files in sources.items()
        }

    def _label(self, source: str) -> str:
        try:
            return str(Path(source).relative_to(self._base))
        except ValueError:
            return source.rpartition("/")[2]

    def _csv(self, label: str, path: Path) -> Iterator[Any]:
        config = self._config
        for option in fields(type(config)):
            known = option.name in _CSV_OPTIONS | _CSV_IGNORED or option.name in _base_options()
            if not known and getattr(config, option.name) != option.default:
                raise DataError(
                    f"{label}: the option {option.name} in the data set's README.md is not supported for CSV files. "
                    "Remove it, or convert the file to Parquet"
                )
        text = _decoded(label, path.read_bytes(), config.encoding or "utf-8", config.encoding_errors or "strict")
        yield from csv_rows(
            label,
            text.removeprefix("\ufeff"),
            names=config.names,
            has_header=config.header == 0 or (config.header == "infer" and config.names is None),
            delimiter=config.sep,
            quotechar=config.quotechar,
            quoting=config.quoting,
            escapechar=config.escapechar,
            doublequote=config.doublequote,
            skipinitialspace=config.skipinitialspace,
        )

    def _json(self, label: str, path: Path) -> Iterator[Any]:
        data = path.read_bytes()
        encoding, errors = self._config.encoding or "utf-8", self._config.encoding_errors or "strict"
        if (encoding, errors) != ("utf-8", "strict"):
            data = _decoded(label, data, encoding, errors).encode()
        yield from json_rows(label, data.removeprefix(_BOM), self._config.field)


class _Lengths(Mapping[str, int]):
    """Number of rows per split; a split is read only when its number is requested."""

    def __init__(self, files: TextFiles) -> None:
        self._text_files = files

    def __getitem__(self, name: str) -> int:
        return len(self._text_files._of(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._text_files._files)

    def __len__(self) -> int:
        return len(self._text_files._files)


def csv_rows(
    label: str, text: str, *, names: Sequence[str] | None = None, has_header: bool = True, **dialect: Any
) -> Iterator[dict[str, str] | BadRow]:
    """Yield the rows of a CSV file, in which every cell is text.

    :param label: Name of the file, for messages.
    :param names: Column names that replace the header's.
    :param dialect: Options of `csv.reader`.
    :raises DataError: The header or the quoting is invalid.
    """
    before = csv.field_size_limit(_MAX_CELL_CHARS)
    try:
        rows = _numbered(label, text, dialect)
    finally:
        csv.field_size_limit(before)
    if has_header and rows:
        header = _columns(label, rows[0][1])
        rows = rows[1:]
    else:
        header = list(map(str, range(len(rows[0][1])))) if rows else []
    columns = list(names) if names else header
    for line, cells in rows:
        if len(cells) == len(columns):
            yield dict(zip(columns, cells, strict=True))
        else:
            yield BadRow(f"line {line} of {label} has {len(cells)} cells, but there are {len(columns)} columns")


def _numbered(label: str, text: str, dialect: Mapping[str, Any]) -> list[tuple[int, list[str]]]:
    """Return all lines that are not empty, as (number of the first line, cells)."""
    line = 1
    rows: list[tuple[int, list[str]]] = []
    try:
        reader = csv.reader(io.StringIO(text, newline=""), strict=True, **dialect)
        for cells in reader:
            if cells:
                rows.append((line, cells))
            line = reader.line_num + 1
    except (csv.Error, TypeError, ValueError) as e:  # the last two: from the dialect
        raise DataError(f"{label}: the row in line {line} is not valid CSV: {e}. Correct its quotation marks") from None
    return rows


def _columns(label: str, header: Sequence[str]) -> list[str]:
    """Return the column names; a column without a name gets the name that pandas uses."""
    columns = [name or f"Unnamed: {number}" for number, name in enumerate(header)]
    if repeated := [name for name, times in Counter(columns).items() if times > 1]:
        raise DataError(f"{label} has several columns called {repeated[0]!r}. Rename all but one")
    return columns


def json_rows(label: str, data: bytes, field: str | None = None) -> Iterator[Any]:
    """Yield the rows of JSON lines, or of one JSON document: a list of objects, or an object with columns.

    :param field: Field of the document that contains the rows.
    :raises DataError: It is neither.
    """
    lines = [(number, line) for number, line in enumerate(data.split(b"\n"), start=1) if line.strip()]
    if not lines:
        return
    first = lines[0][1].strip()
    if field is None and _is_row(first, only=len(lines) == 1):
        yield from (_row(f"line {number} of {label}", line) for number, line in lines)
        return
    try:
        document = parse_json(data)
    except BadRow as e:
        if field is None and first != b"{" and not first.startswith(b"["):  # JSON lines with an invalid first line
            yield from (_row(f"line {number} of {label}", line) for number, line in lines)
            return
        raise DataError(f"{label} is neither JSON lines nor one JSON document: {e}") from None
    yield from _rows_of_document(label, document, field)


def _is_row(line: bytes, *, only: bool) -> bool:
    """Return whether the first line of a file is a row; a single line may be a document with all rows."""
    if not line.startswith(b"{"):
        return False
    try:
        value = parse_json(line)
    except BadRow:
        return False
    return not (only and _is_table(value))


def _row(place: str, line: bytes) -> Any:
    try:
        return parse_json(line)
    except BadRow as e:
        return BadRow(f"{place}: {e}")


def _rows_of_document(label: str, document: Any, field: str | None) -> Iterable[Any]:
    if field is not None:
        if not isinstance(document, dict) or field not in document:
            raise DataError(f"{label} has no field {field!r}, which the data set's README.md refers to")
        document = document[field]
    if isinstance(document, list):
        return [{"text": row} if isinstance(row, str) else row for row in document]
    if _is_table(document):
        return [dict(zip(document, values, strict=True)) for values in zip(*document.values(), strict=True)]
    return [document]


def _is_table(value: Any) -> bool:
    """Return whether a value is an object of columns: lists of equal length."""
    if not isinstance(value, dict) or not value or not all(isinstance(column, list) for column in value.values()):
        return False
    return len({len(column) for column in value.values()}) == 1


def _decoded(label: str, data: bytes, encoding: str, errors: str) -> str:
    try:
        return data.decode(encoding, errors)
    except UnicodeDecodeError as e:
        line = data[: e.start].count(b"\n") + 1
        raise DataError(
            f"{label}: byte {data[e.start]:#04x} in line {line} is not {encoding.upper()}. Save the file as UTF-8"
        ) from None
    except LookupError:
        raise DataError(f"{label}: the data set's README.md has the unknown encoding {encoding!r}") from None


def guessed_column(rows: Any) -> tuple[str, str] | None:
    """Return a column of a prepared data set whose text was replaced by a guessed type, and the type; None without one.

    :param rows: A `datasets.Dataset` that an earlier download created from CSV or JSON files.
    """
    kind = rows.info.builder_name
    for name, feature in rows.features.items():
        dtype = str(getattr(feature, "dtype", ""))
        guessed = dtype.startswith(("timestamp", "date", "time"))
        guessed |= kind == "csv" and (dtype not in ("string", "large_string") or rows.data.column(name).null_count > 0)
        if kind in ("csv", "json") and guessed:
            return name, dtype
    return None


def _reads_csv(builder: Any) -> bool:
    from datasets.packaged_modules.csv.csv import Csv

    return isinstance(builder, Csv)


def _reads_json(builder: Any) -> bool:
    from datasets.packaged_modules.json.json import Json

    return isinstance(builder, Json)


def _base_options() -> set[str]:
    from datasets import BuilderConfig

    return {option.name for option in fields(BuilderConfig)}
