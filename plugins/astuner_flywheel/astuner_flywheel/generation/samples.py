"""Sample tasks from a JSON Lines file: a question and an answer each, by the fields the jsonl reader knows.

Invariant: every line is a sample, or the file is refused with the line's number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from astuner.contracts.errors import DataError
from astuner.support.strict_json import parse
from astuner_flywheel.generation.config import DataGenerationConfig

_QUERIES = ("main_query", "question", "problem", "query", "prompt")
_IDS = ("task_id", "id")
_LONGEST_FILE = 100_000_000


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One sample task."""

    id: str
    """Its own, or the file's name and the line's number."""
    question: str
    answer: str
    history: tuple[Mapping[str, Any], ...]
    """Messages before the question (``init_messages``): a system prompt, or a conversation that it goes on."""

    @property
    def stands_alone(self) -> bool:
        """Whether it can be understood without what was said before."""
        return all(message["role"] in ("system", "developer") for message in self.history)


def read_samples(config: DataGenerationConfig, path: Path) -> tuple[tuple[Sample, ...], str]:
    """The samples of ``path``, and the hash of the file.

    :raises DataError: the file or a line of it cannot be read.
    """
    path = path.expanduser()
    try:
        if path.stat().st_size > _LONGEST_FILE:
            raise DataError(f"{path} has more than {_LONGEST_FILE / 1e6:g} MB; take a handful of them")
        data = path.read_bytes()
    except OSError as e:
        raise DataError(
            f"cannot read the samples in {path}: {e.strerror or e}; correct seeds (relative paths start at the "
            "experiment file)"
        ) from None
    samples = []
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            row = parse(line)
        except ValueError as e:
            raise DataError(f"{place}: no sample: {e}. Correct the line") from None
        samples.append(_sample(row, place, f"{path.name}:{number}", config))
    if not samples:
        raise DataError(f"{path} has no sample: it is empty")
    if not config.documents and not any(sample.stands_alone for sample in samples):
        raise DataError(
            f"every sample in {path} goes on a conversation (init_messages), and new tasks are made like first "
            "questions only; add samples that can be understood alone"
        )
    return tuple(samples), hashlib.sha256(data).hexdigest()


def _sample(row: Mapping[str, Any], place: str, default_id: str, config: DataGenerationConfig) -> Sample:
    inner = row.get("metadata")
    values = {**row, **inner} if isinstance(inner, Mapping) else row
    names = [config.query_field] if config.query_field else list(_QUERIES)
    question = next((values[name] for name in names if values.get(name) is not None), None)
    answer = values.get(config.answer_field)
    if not isinstance(question, str) or not question.strip():
        raise DataError(f"{place}: no question in {' or '.join(names)}; its fields: {', '.join(row)}. Set query_field")
    if isinstance(answer, (int, float)) and not isinstance(answer, bool):
        answer = str(answer)
    if not isinstance(answer, str) or not answer.strip():
        raise DataError(
            f"{place}: no answer in {config.answer_field!r}; its fields: {', '.join(values)}. Set answer_field"
        )
    own = next((values[name] for name in _IDS if values.get(name) not in (None, "")), default_id)
    history = row.get("init_messages") or []
    if not isinstance(history, list) or not all(isinstance(m, Mapping) and m.get("role") for m in history):
        raise DataError(f"{place}: init_messages is not a list of messages with a role. Correct the line")
    return Sample(id=str(own), question=question.strip(), answer=answer.strip(), history=tuple(history))
