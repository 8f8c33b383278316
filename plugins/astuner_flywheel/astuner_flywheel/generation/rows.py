"""A task as a line of JSON, and as a `Task`.

What the jsonl reader makes of a line is what `task_of` makes of it, so a finished folder can be used by either reader.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from astuner import Task
from astuner_flywheel.generation import prompts
from astuner_flywheel.generation.checks import locate
from astuner_flywheel.generation.samples import Sample
from astuner_flywheel.generation.units import Candidate


def task_row(found: Candidate, *, model: str) -> dict[str, Any]:
    """The line of an accepted task; where it is from stands in ``metadata.provenance``.

    The system prompt of the samples that it was made of is its own, too, where they have the same one.
    """
    chunk = found.unit.chunk
    provenance: dict[str, Any] = {
        "source": "seed" if chunk is None else "document",
        "document": None,
        "sha256": None,
        "span": None,
        "page": None,
        "seed_tasks": [sample.id for sample in found.unit.samples],
        "model": model,
        "prompt_version": prompts.VERSION,
    }
    metadata: dict[str, Any] = {"answer": found.answer, "provenance": provenance}
    if chunk is not None:
        place = locate(found.evidence, chunk.text)
        assert place is not None  # a task without evidence is not accepted
        span = [chunk.start + place[0], chunk.start + place[1]]
        document = chunk.document
        provenance.update(document=document.path, sha256=document.sha256, span=span, page=document.page_of(span[0]))
        metadata["evidence"] = document.text[span[0] : span[1]]
    shown = found.unit.samples if chunk is None else ()
    same = all(sample.history == shown[0].history for sample in shown)
    return {
        "task_id": found.id,
        "main_query": found.question,
        **_history(shown[0].history if shown and same else ()),
        "metadata": metadata,
        "unit": found.unit.id,
        "number": found.number,
        "passage": None if chunk is None else chunk.id,
        "index": found.unit.index,
    }


def sample_row(sample: Sample) -> dict[str, Any]:
    """The line of a sample that becomes a task itself (`use_seeds`)."""
    provenance = {"source": "sample", "seed_tasks": [sample.id]}
    metadata = {"answer": sample.answer, "provenance": provenance}
    return {"task_id": sample.id, "main_query": sample.question, **_history(sample.history), "metadata": metadata}


def kept_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a line of ``tasks.jsonl`` that is the task."""
    return {name: row[name] for name in ("task_id", "main_query", "init_messages", "metadata") if name in row}


def task_of(row: Mapping[str, Any]) -> Task:
    """The task in a line of ``train.jsonl`` or ``validation.jsonl``."""
    named = {name: value for name, value in row.items() if name != "metadata"}
    history = tuple(row.get("init_messages", ()))
    metadata = {**named, **row["metadata"]}
    return Task(task_id=row["task_id"], main_query=row["main_query"], init_messages=history, metadata=metadata)


def _history(messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The field of a line, which most tasks do not have."""
    return {"init_messages": list(messages)} if messages else {}
