"""Fingerprints of tasks: check that a run resumes with its original tasks, and describe differences.

A task is identified by its content, not by its file. Renaming a file, or reading the same rows with another task
reader, changes nothing.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time
from decimal import Decimal
from pathlib import Path, PurePath
from typing import Any
from uuid import UUID

from astuner.contracts.errors import RunError
from astuner.contracts.rows import ID_FIELDS
from astuner.contracts.types import Task
from astuner.runs.run_dir import RunDir

_PLACE = re.compile(r".*:\d+")
"""Label of a task whose data set has no IDs: file or split, and number."""
_MAX_DEPTH = 64


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """The tasks of a run as an ordered list of digests."""

    train: Sequence[str]
    validation: Sequence[str]

    @classmethod
    def of(cls, train: Sequence[Task], validation: Sequence[Task]) -> Fingerprint:
        return cls(train=list(map(digest, train)), validation=list(map(digest, validation)))

    @classmethod
    def read(cls, path: Path) -> Fingerprint | None:
        """Return the fingerprint in a run folder, or None for a folder of an earlier version.

        :raises RunError: The file is damaged.
        """
        if not path.exists():
            return None
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            return cls(train=list(map(str, saved["train"])), validation=list(map(str, saved["validation"])))
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as e:
            raise RunError(f"{path} is damaged: {e}. Move the file away to resume without comparing the tasks") from e

    def write(self, path: Path) -> None:
        saved = {"train": list(self.train), "validation": list(self.validation)}
        RunDir.write_atomically(path, json.dumps(saved) + "\n")


def digest(task: Task) -> str:
    """Return a digest of a task's content. A label that is only a position in a file does not count."""
    is_place = not task.has_environment and _PLACE.fullmatch(task.task_id)
    return _digest(task, "" if is_place else task.task_id, task.metadata)


def describe_count(tasks: Sequence[Task], purpose: str) -> str:
    """Return the number of distinct tasks and their repetitions: ``20 to train on (each 100 times)``.

    Rows that differ only in their ID are the same task. Tasks of an environment are identified by their ID.

    :param purpose: For example ``to train on``.
    """
    times = Counter(map(_digest_without_id, tasks))
    if len(times) == len(tasks):
        return f"{len(tasks)} {purpose}"
    if len(set(times.values())) == 1:
        return f"{len(times)} {purpose} (each {len(tasks) // len(times)} times)"
    return f"{len(tasks)} {purpose} ({len(times)} different)"


def describe_difference(before: Sequence[str], now: Sequence[str], tasks: Sequence[Task]) -> str:
    """Describe the difference between two lists of digests: ``1 changed, 4 added; the first is train.jsonl:1``.

    :param tasks: The tasks of ``now``.
    :returns: An empty string if nothing differs.
    """
    if list(before) == list(now):
        return ""
    new, gone = Counter(now) - Counter(before), Counter(before) - Counter(now)
    added, removed = sum(new.values()), sum(gone.values())
    if not added and not removed:
        return f"the same {len(now)} in another order"
    counts = {"changed": min(added, removed), "added": added - removed, "removed": removed - added}
    parts = ", ".join(f"{count} of {len(before)} {what}" if what != "added" else f"{count} {what}"
                      for what, count in counts.items() if count > 0)  # fmt: skip
    first = next((task.task_id for task, own in zip(tasks, now, strict=True) if own in new), "")
    return f"{parts}; the first is {first}" if first else parts


def _digest_without_id(task: Task) -> str:
    ids = {name: str(task.metadata[name]) for name in ID_FIELDS if name in task.metadata}
    if task.has_environment or not (_PLACE.fullmatch(task.task_id) or task.task_id in ids.values()):
        return _digest(task, task.task_id, task.metadata)  # a reader's own ID may be the only difference between tasks
    return _digest(task, "", {name: value for name, value in task.metadata.items() if name not in ids})


def _digest(task: Task, label: str, metadata: Mapping[str, Any]) -> str:
    content = [label, task.main_query, list(task.init_messages), task.env_type, metadata]
    try:
        text = json.dumps(content, sort_keys=True, default=_plain)
    except (TypeError, ValueError, RecursionError):  # keys of several types, or a value that contains itself
        text = json.dumps(_canonical(content))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _plain(value: Any) -> Any:
    """Convert a value that JSON does not support; the result is the same in every process."""
    if isinstance(value, (date, time, Decimal, UUID, PurePath)):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    if isinstance(value, bytes):
        return value.hex()
    return str(type(value))  # the type only: the text of other objects may contain an address


def _canonical(value: Any, depth: int = 0) -> Any:
    if depth > _MAX_DEPTH:
        return "…"
    if isinstance(value, Mapping):
        pairs = [(f"{type(k).__name__} {k!r}", _canonical(v, depth + 1)) for k, v in value.items()]
        return sorted(pairs, key=lambda pair: pair[0])
    if isinstance(value, (list, tuple)):
        return [_canonical(item, depth + 1) for item in value]
    return value if value is None or isinstance(value, (str, int, float)) else _plain(value)
