"""Read an episode as a question with an answer, and store human labels.

A label is a line of ``labels.jsonl`` in the run folder; the newest line for an episode counts. It refers to one row of
the log, so an episode that is generated again after a rewind has no label.
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
"""Maximum characters of a label's reason."""
_LARGEST = 64 << 20
"""Maximum bytes of a label file."""
REFERENCES = (
    "answer", "reference", "reference_answer", "final_answer", "ground_truth", "expected", "target", "solution",
    "label",
)  # fmt: skip
"""Metadata keys that may contain a task's reference answer, in order of priority."""
_PAYLOAD = re.compile(r"(?<!\w)'[^'\n]*[^\w'\n][^'\n]*'(?!\w)|(?<!\w)\"[^\"\n]*[^\w\"\n][^\"\n]*\"(?!\w)|\{.*\}")
"""Quoted text (except single names) and text in braces."""
_NUMBER = re.compile(r"(?<![\w.:+/-])[\w.:+/-]*?\d(?:[\w.:+/-]*\w)?")
"""Numbers, times, addresses, and IDs or paths that contain a digit."""
_ZEROS = str.maketrans("123456789", "0" * 9)


def question_of(row: Mapping[str, Any]) -> str:
    """Return the question of a log row: its query, or the text of its first messages."""
    return row["query"] or "\n".join(_text(m.get("content")) for m in json.loads(row["task"])["init_messages"])


def answer_of(row: Mapping[str, Any]) -> str:
    """Return the final answer: ``final_answer`` or ``response`` of the output, or the text of the last reply."""
    output = json.loads(row["output"] or "null") or {"metadata": {}, "response": None}
    for said in (output["metadata"].get("final_answer"), output["response"]):
        if said not in (None, ""):
            return _text(said)
    return _text(json.loads(row["turns"][-1]["reply"]).get("content")) if row["turns"] else ""


def expected_of(row: Mapping[str, Any]) -> str:
    """Return the reference answer of the task, or an empty string if it is unknown."""
    metadata = json.loads(row["task"])["metadata"]
    return _text(next((metadata[name] for name in REFERENCES if metadata.get(name) not in (None, "")), None))


def _text(said: Any) -> str:
    if isinstance(said, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in said):
        return "\n".join(part["text"] for part in said)
    return "" if said is None else said if isinstance(said, str) else json.dumps(said, ensure_ascii=False)


def cause_of(error: str) -> str:
    """Return the first line of an error without payload, numbers, times and IDs, so that equal causes compare equal."""
    return _cause(str(error)[:300].partition("\n")[0].translate(_ZEROS))


@lru_cache(maxsize=4096)  # most errors of a log differ in digits only
def _cause(line: str) -> str:
    return _NUMBER.sub("#", _PAYLOAD.sub("…", line))


def add_label(run: Path, row_id: int, episode_id: str, label: str, why: str) -> None:
    """Append a label for an episode.

    :param run: Run folder.
    :param row_id: ID of the episode's row in the log.
    :param label: One of `LABELS`, or "" to remove an earlier label.
    :raises OSError: The file cannot be written, or is not a regular file.
    """
    said = {"id": row_id, "episode_id": episode_id, "label": label, "why": why, "time": round(time.time(), 3)}
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK  # O_NONBLOCK: never wait on a pipe
    with open(os.open(run / FILE, flags, 0o666), "ab", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{FILE} is not a regular file")
        file.write(json.dumps(said).encode() + b"\n")  # one write, so concurrent writers do not mix lines


def labels_at(run: Path) -> object:
    """Return a value that changes when a label is written, or None without a label file."""
    try:
        found = os.lstat(run / FILE)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def read_labels(run: Path) -> dict[int, tuple[str, str]]:
    """Return row ID -> (label, reason), skipping malformed lines."""
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
