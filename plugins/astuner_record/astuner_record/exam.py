"""An episode read as an exam: what was answered, what was expected, why it failed, and what people say of it.

A label is a line of ``labels.jsonl`` in the run folder; the newest of an episode counts.  It is of one row of the log,
so an episode that is drawn again after a rewind has none.
"""

from __future__ import annotations

import json
import os
import re
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from astuner_record.foreign import is_plain_file

FILE = "labels.jsonl"
LABELS = ("good", "bad")
MOST_WHY = 4000
"""Characters of a reason."""
_LARGEST = 64 << 20
"""Bytes of a file of labels that is read."""
REFERENCES = (
    "answer", "reference", "reference_answer", "final_answer", "ground_truth", "expected", "target", "solution",
    "label",
)  # fmt: skip
"""Where a task's reference answer is looked for in its metadata, in this order."""
_PAYLOAD = re.compile(r"(?<!\w)'[^'\n]*[^\w'\n][^'\n]*'(?!\w)|(?<!\w)\"[^\"\n]*[^\w\"\n][^\"\n]*\"(?!\w)|\{.*\}")
"""Quoted text, but for a name, and what is in braces."""
_NUMBER = re.compile(r"(?<![\w.:+/-])[\w.:+/-]*?\d(?:[\w.:+/-]*\w)?")
"""Numbers, times, addresses, and ids and paths with a digit in them."""
_ZEROS = str.maketrans("123456789", "0" * 9)


def question_of(row: Mapping[str, Any]) -> str:
    """What a row of the log was asked: its query, else the texts of its first messages."""
    return row["query"] or "\n".join(_text(m.get("content")) for m in json.loads(row["task"])["init_messages"])


def answer_of(row: Mapping[str, Any]) -> str:
    """What was answered in the end: the output's ``final_answer`` or ``response``, else the text of the last reply."""
    output = json.loads(row["output"] or "null") or {"metadata": {}, "response": None}
    for said in (output["metadata"].get("final_answer"), output["response"]):
        if said not in (None, ""):
            return _text(said)
    return _text(json.loads(row["turns"][-1]["reply"]).get("content")) if row["turns"] else ""


def expected_of(row: Mapping[str, Any]) -> str:
    """The reference answer of the task; empty where none is known."""
    metadata = json.loads(row["task"])["metadata"]
    return _text(next((metadata[name] for name in REFERENCES if metadata.get(name) not in (None, "")), None))


def _text(said: Any) -> str:
    if isinstance(said, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in said):
        return "\n".join(part["text"] for part in said)
    return "" if said is None else said if isinstance(said, str) else json.dumps(said, ensure_ascii=False)


def cause_of(error: str) -> str:
    """The first line of an error without what tells one occurrence from the next: payload, numbers, times, ids."""
    return _cause(str(error)[:300].partition("\n")[0].translate(_ZEROS))


@lru_cache(maxsize=4096)  # a reader goes through all errors of a log, and most differ in digits alone
def _cause(line: str) -> str:
    return _NUMBER.sub("#", _PAYLOAD.sub("…", line))


def add_label(run: Path, row_id: int, episode_id: str, label: str, why: str) -> None:
    """Say what an episode is worth.

    :param run: the run folder.
    :param row_id: of its row in the log.
    :param label: one of `LABELS`, or "" to take an earlier one back.
    :raises OSError: it cannot be written, or a link or something else stands in the file's place.
    """
    said = {"id": row_id, "episode_id": episode_id, "label": label, "why": why, "time": round(time.time(), 3)}
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe would wait for a reader
    with open(os.open(run / FILE, flags, 0o666), "ab", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{FILE} is no file")
        file.write(json.dumps(said).encode() + b"\n")  # in one piece, whoever else writes


def labels_at(run: Path) -> object:
    """What differs once a label was written; None where there is no file."""
    try:
        found = os.lstat(run / FILE)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def read_labels(run: Path) -> dict[int, tuple[str, str]]:
    """Row of the log -> label and why; lines that say something else are passed over."""
    path = run / FILE
    if not is_plain_file(path) or path.stat().st_size > _LARGEST:
        return {}
    found: dict[int, tuple[str, str]] = {}
    for line in path.read_bytes().splitlines():
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            said = json.loads(line)
            row_id, label, why = said["id"], said["label"], said["why"]
            if type(row_id) is int and 0 < row_id < 1 << 63 and label in (*LABELS, "") and type(why) is str:
                found[row_id] = label, why[:MOST_WHY].encode("utf-8", "replace").decode()
    return {row_id: one for row_id, one in found.items() if one[0]}
