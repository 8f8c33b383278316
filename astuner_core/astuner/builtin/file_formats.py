"""Recognize files that are not JSON Lines, to report how to read or convert them."""

from __future__ import annotations

import csv
import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

_HEAD_BYTES = 1 << 16
_MAX_PARSED_BYTES = 1 << 28
_COMPARED_LINES = 20
_READER = "astuner.task_reader.type: huggingface and astuner.task_reader.huggingface.dataset_path: {given}"
_LOAD = "json.load(open(sys.argv[1]))"
_CSV = "csv.DictReader(open(sys.argv[1], newline=''){})"
_MAGIC: Mapping[bytes, tuple[str, str]] = {
    b"\x1f\x8b": ("compressed with gzip", "gzip -dc {path} > {new}"),
    b"BZh": ("compressed with bzip2", "bzip2 -dc {path} > {new}"),
    b"\xfd7zXZ\x00": ("compressed with xz", "xz -dc {path} > {new}"),
    b"\x28\xb5\x2f\xfd": ("compressed with zstd", "zstd -dc {path} > {new}"),
    b"PK\x03\x04": ("a ZIP archive or an Excel file", ""),
    b"PAR1": ("a Parquet file", ""),
    b"ARROW1": ("an Arrow file", ""),
    b"\xff\xff\xff\xff": ("an Arrow file", ""),
    b"SQLite format 3\x00": ("a SQLite database", ""),
    b"\xff\xfe": ("UTF-16 text", "iconv -f UTF-16 -t UTF-8 {path} > {new}"),
    b"\xfe\xff": ("UTF-16 text", "iconv -f UTF-16 -t UTF-8 {path} > {new}"),
    b"version https://git-lfs": ("a Git LFS pointer without the data; get the data with: git lfs pull", ""),
}
"""First bytes of a file -> its format, and the command that converts it."""
_READABLE: Mapping[str, tuple[str, ...]] = {
    "a JSON list": (".json", ".jsonl", ".ndjson"),
    "a JSON object of columns": (".json", ".jsonl", ".ndjson"),
    "a CSV file": (".csv",),
    "a TSV file": (".tsv",),
    "a Parquet file": (".parquet",),
    "an Arrow file": (".arrow",),
}
"""Format -> file suffixes with which the task reader ``huggingface`` reads it."""


def describe_other_format(path: Path, given: str) -> str:
    """Return the format of a file that is not JSON Lines, with the reader or command for it; empty if it is unknown.

    :param given: The path as written in the experiment.
    """
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    magic = next((found for start, found in _MAGIC.items() if head.startswith(start)), None)
    kind, command = magic or _text_format(path, head)
    if not kind:
        return ""
    same = path.suffix == ".jsonl"
    new = path.with_name(f"{path.stem}.converted.jsonl" if same else f"{path.name.partition('.')[0]}.jsonl")
    convert = command.format(path=shlex.quote(str(path)), new=shlex.quote(str(new)))
    remedies = []
    if suffixes := _READABLE.get(kind, ()):
        rename = "" if path.suffix in suffixes else f"Rename it to {path.stem}{suffixes[0]} and r"
        readable = Path(given) if not rename else Path(given).with_suffix(suffixes[0])
        remedies.append(f"{rename or 'R'}ead it with {_READER.format(given=readable)}")
    remedies += [f"{'or c' if remedies else 'C'}onvert it: {convert}"] if convert else []
    return f"is {kind}, not JSON Lines. {'; '.join(remedies) or 'Convert it to one JSON object per line'}"


def _text_format(path: Path, head: bytes) -> tuple[str, str]:
    if b"\x00" in head or path.stat().st_size > _MAX_PARSED_BYTES:
        return "", ""
    text = path.read_text(encoding="utf-8-sig", errors="replace").strip()
    if text[:1] in ("[", "{"):
        return _json_format(text)
    if text[:15].lower().startswith(("<!doctype", "<html", "<?xml")):
        return "a web page or XML; download the data itself", ""
    if text.startswith(("- ", "---")) or path.suffix in (".yaml", ".yml"):
        return _yaml_format(text)
    name, delimiter, option = next(_delimiters(path, text), ("", "", ""))
    return (f"a {name} file", _command("csv", _CSV.format(option))) if delimiter else ("", "")


def _json_format(text: str) -> tuple[str, str]:
    try:
        document = json.loads(text)
    except json.JSONDecodeError as e:
        several = e.msg == "Extra data" and "\n" in text[: e.pos].rstrip()
        return ("a sequence of JSON objects over several lines", "jq -c . {path} > {new}") if several else ("", "")
    except (RecursionError, ValueError):
        return "", ""
    if isinstance(document, list):
        is_rows = bool(document) and all(isinstance(row, dict) for row in document)
        return ("a JSON list", _command("json", _LOAD)) if is_rows else ("", "")
    lists = {name: rows for name, rows in document.items() if isinstance(rows, list) and rows}
    rows = next((name for name, rows in lists.items() if all(isinstance(row, dict) for row in rows)), None)
    if rows is not None and str(rows).isidentifier():
        return f"a JSON object with the rows in its field {rows!r}", _command("json", f"{_LOAD}['{rows}']")
    is_columns = len(lists) == len(document) > 1 and len(set(map(len, lists.values()))) == 1
    return ("a JSON object of columns", "") if is_columns else ("", "")


def _yaml_format(text: str) -> tuple[str, str]:
    try:
        document: Any = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError):
        return "", ""
    if isinstance(document, list) and document and all(isinstance(row, dict) for row in document):
        return "a YAML list", _command("yaml", "yaml.safe_load(open(sys.argv[1]))")
    return ("a YAML file", "") if isinstance(document, dict) else ("", "")


def _delimiters(path: Path, text: str) -> Iterator[tuple[str, str, str]]:
    """Yield the formats of a text with a table: name, delimiter, and its option of `csv.DictReader`."""
    lines = text.splitlines()
    for name, delimiter, option in (
        ("TSV", "\t", ", delimiter='\\t'"),
        ("CSV", ",", ""),
        ("semicolon-separated CSV", ";", ", delimiter=';'"),
    ):
        try:
            rows = [row for _, row in zip(range(_COMPARED_LINES), csv.reader(lines, delimiter=delimiter), strict=False)]
        except csv.Error:
            continue
        widths = {len(row) for row in rows if row}
        is_table = len(rows) > 1 and len(widths) == 1 and widths != {1}
        if is_table or path.suffix == f".{name.lower()}":
            yield name, delimiter, option


def _command(module: str, rows: str) -> str:
    modules = ", ".join(sorted({module, "json", "sys"}))
    code = f"import {modules}; [print(json.dumps(row, default=str)) for row in {rows}]"
    return f'python -c "{code}" {{path}} > {{new}}'
