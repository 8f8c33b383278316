"""The columns of the episode log, and how its files are called.

A column may be added within a format: who reads a file asks for columns by name, and takes one that is not there for
null.  Anything else needs a new format.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from astuner.contracts.errors import DataError, MissingDependency

FORMAT = 1
TOKENS = "tokens"
"""Files with episodes, a row each; those of a batch are of one step, and ended at about the same time."""
CREDIT = "credit"
"""Files with what was credited, a row per sample: those of a batch are of one step, and an episode is in one batch."""
INDEX = "index.sqlite"

_NAME = re.compile(rf"({TOKENS}|{CREDIT})-(\d+)\.arrows")
_FORMAT_KEY, _KIND_KEY, _ID_KEY = b"astuner.format", b"astuner.kind", b"astuner.file"


def pyarrow() -> Any:
    """The library.

    :raises MissingDependency: it is not installed, or what the log needs beside it.
    """
    try:
        import msgspec  # noqa: F401
        import orjson  # noqa: F401
        import pyarrow
        import pyarrow.ipc
    except ImportError as e:
        raise MissingDependency(
            f"the episode log needs pyarrow, msgspec and orjson ({e}): pip install astuner-record"
        ) from None
    return pyarrow


def schema(kind: str) -> Any:
    """The Arrow schema of a new file; its metadata name the format, the kind, and this one file."""
    pa = pyarrow()
    fields = _episode_fields(pa) if kind == TOKENS else _credit_fields(pa)
    return identified(pa.schema(fields), kind)


def identified(columns: Any, kind: str) -> Any:
    """``columns`` with the metadata of a file of its own."""
    about = {_FORMAT_KEY: str(FORMAT), _KIND_KEY: kind, _ID_KEY: uuid.uuid4().hex}
    return columns.with_metadata(about)


def identity(columns: Any, path: Path) -> tuple[str, str]:
    """Kind and id of the file at ``path``, whose schema ``columns`` is.

    :raises DataError: it is no file of the episode log, or of a format that this ASTuner does not know.
    """
    about = columns.metadata or {}
    if not {_FORMAT_KEY, _KIND_KEY, _ID_KEY} <= about.keys():
        raise DataError(f"{path} was not written by ASTuner; move it out of the run folder")
    if (version := int(about[_FORMAT_KEY])) > FORMAT:
        raise DataError(
            f"{path} has format {version} of the episode log, and this ASTuner reads formats up to {FORMAT}: "
            "pip install --upgrade astuner-core"
        )
    return about[_KIND_KEY].decode(), about[_ID_KEY].decode()


def file_name(kind: str, number: int) -> str:
    return f"{kind}-{number:06d}.arrows"


def files(folder: Path) -> list[Path]:
    """The files of a log, in the order they were written, those with episodes first."""
    found = [(match[1], int(match[2]), path) for path, match in _named(folder)]
    return [path for _, _, path in sorted(found, key=lambda f: (f[0] != TOKENS, f[1]))]


def next_number(folder: Path) -> int:
    """The number of the file that comes after all of a log's, of either kind."""
    return max((int(match[2]) for _, match in _named(folder)), default=0) + 1


def _named(folder: Path) -> Iterator[tuple[Path, re.Match[str]]]:
    if folder.is_dir():
        for path in folder.iterdir():
            if match := _NAME.fullmatch(path.name):
                yield path, match


def _episode_fields(pa: Any) -> list[Any]:
    text, whole, number, flag = pa.string(), pa.int32(), pa.float64(), pa.bool_()
    ids, logprobs = pa.list_(pa.int32()), pa.list_(pa.float32())
    turn = pa.struct(
        [
            ("index", whole),
            ("agent", text),
            ("role", text),
            ("policy", text),
            ("trained", flag),
            ("lost", flag),
            ("continues", whole),
            ("branch_reason", text),
            ("approximation", text),
            ("finish_reason", text),
            ("policy_version", whole),
            ("prompt_tokens", whole),
            ("response_tokens", whole),
            ("prompt_ids", ids),
            ("response_ids", ids),
            ("logprobs", logprobs),
            ("request", text),
            ("tools", text),
            ("reply", text),
            ("started", number),
            ("seconds", number),
        ]
    )
    external = pa.struct(
        [
            ("index", whole),
            ("agent", text),
            ("role", text),
            ("model", text),
            ("request", text),
            ("reply", text),
            ("prompt_tokens", whole),
            ("response_tokens", whole),
            ("started", number),
            ("seconds", number),
        ]
    )
    columns = [
        ("episode_id", text),
        ("group_id", text),
        ("task_id", text),
        ("step", whole),
        ("split", text),
        ("attempt", whole),
        ("time", number),
        ("query", text),
        ("stop_reason", text),
        ("reward", number),
        ("rewards", text),
        ("reward_source", text),
        ("is_success", flag),
        ("error", text),
        ("seconds", number),
        ("retries", whole),
        ("task", text),
        ("output", text),
        ("metrics", text),
        ("turns", pa.list_(turn)),
        ("external", pa.list_(external)),
        ("started", number),
    ]
    return [pa.field(name, kind) for name, kind in columns]


def _credit_fields(pa: Any) -> list[Any]:
    text, whole, number = pa.string(), pa.int32(), pa.float64()
    columns = [
        ("step", whole),
        ("episode_id", text),
        ("group_id", text),
        ("agent", text),
        ("role", text),
        ("policy", text),
        ("sample", whole),
        ("advantage", number),
        ("token_weight", number),
        ("reward", number),
        ("tokens", whole),
        ("trained_tokens", whole),
        ("policy_version", whole),
        ("trainer_logprobs", pa.list_(pa.float32())),
    ]
    return [pa.field(name, kind) for name, kind in columns]
