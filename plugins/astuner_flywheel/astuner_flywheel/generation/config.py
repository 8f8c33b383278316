"""The section ``astuner.task_reader.data_generation``: material of new tasks, and how they are checked.

Older spellings (AgentJet's ``document_reader.document_path``, ``query_reader``, ``task_num``) are accepted if they have
the same meaning. Keys with another meaning, or none, are rejected with the key to use instead. Invariant: every
accepted section can be planned without requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal

from pydantic import AliasChoices, Field, model_validator

from astuner.contracts.section import Section
from astuner_flywheel.documents.document import Limits

_HARMLESS = {"cache_enabled", "languages", "split_by"}
"""Ignored keys of ``document_reader``: texts are always cached, only scans need languages, passages end at
sentences."""


def todays(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section with older spellings replaced.

    :raises ValueError: An older key has no equivalent, or a key has two spellings.
    """
    new = dict(data)
    if isinstance(reader := new.get("document_reader"), Mapping):
        new.pop("document_reader")
        unknown = sorted(set(reader) - _HARMLESS - {"document_path", "chunk_size"})
        if unknown:
            raise ValueError(f"document_reader.{unknown[0]} is not supported; use documents: [paths]")
        path = reader.get("document_path", [])
        _put(new, "documents", [path] if isinstance(path, str) else path, "document_reader.document_path")
        if "chunk_size" in reader:
            _put(new, "chunk_characters", reader["chunk_size"], "document_reader.chunk_size")
    if isinstance(reader := new.get("query_reader"), Mapping):
        new.pop("query_reader")
        _put(new, "seeds", _seeds_of(reader), "query_reader")
    return new


def _seeds_of(reader: Mapping[str, Any]) -> Any:
    section = reader.get("jsonl_dataset_file") or reader.get("jsonl")
    training = section.get("training") if isinstance(section, Mapping) else None
    path = training.get("file_path") if isinstance(training, Mapping) else None
    if path is None or reader.get("type", "jsonl") not in ("jsonl", "jsonl_dataset_file"):
        raise ValueError("samples are read from a JSON Lines file: use seeds: samples.jsonl instead of query_reader")
    return path


def _put(data: dict[str, Any], name: str, value: Any, older: str) -> None:
    if name in data:
        raise ValueError(f"{older} is the older name of {name}, which is also set; keep one of them")
    data[name] = value


_LIMITS = Limits()


class Meaning(Section):
    """Comparison of questions by meaning."""

    helper_model: str = Field(min_length=1)
    """Helper model whose server supports embeddings (`/v1/embeddings`)."""
    threshold: float = Field(0.92, gt=0, le=1)
    """Cosine at which two questions have the same meaning. A good value depends on the model."""


class DataGenerationConfig(Section):
    """Generate tasks from documents, from samples, or from both: then samples show the style of a task."""

    helper_model: str = Field(min_length=1)
    """Name of the model in `astuner.helper_models` that writes and checks tasks."""
    documents: list[str] = Field([], validation_alias=AliasChoices("documents", "document_reader"))
    """Files, folders (recursive) or patterns such as `manuals/**/*.pdf`, relative to the experiment file."""
    seeds: str | None = Field(None, validation_alias=AliasChoices("seeds", "query_reader"))
    """JSON Lines file with sample tasks, relative to the experiment file."""
    query_field: str | None = None
    """Field of the samples' question. Default: the first of main_query, question, problem, query, prompt."""
    answer_field: str = Field("answer", min_length=1)
    """Field of the samples' answer."""
    tasks: int = Field(100, ge=1, validation_alias=AliasChoices("tasks", "task_num"))
    """Number of tasks. Fewer are generated if documents or samples do not yield enough different ones."""
    validation_share: float = Field(0.1, ge=0, lt=1)
    """Share of validation tasks. Near-duplicates are always on one side."""
    use_seeds: Literal["examples", "train", "validation"] = "examples"
    """Use samples only as examples, or also as training or validation tasks; `validation` validates on them only."""
    instructions: str = ""
    """Description of the tasks in your own words: difficulty, style, form of the answer."""
    language: str = ""
    """Language of the tasks, e.g. `German`. Default: language of the document or the samples."""
    temperature: float = Field(0.8, ge=0)
    """Sampling temperature for writing tasks."""
    per_call: int = Field(5, ge=1, le=50)
    """Number of tasks per request."""
    rounds: int = Field(3, ge=1)
    """Maximum requests per passage (for samples: multiple of the expected requests)."""
    max_question_characters: int = Field(2000, ge=1)
    """Maximum characters of a question."""
    max_answer_characters: int = Field(500, ge=1)
    """Maximum characters of an answer."""
    check: bool = True
    """Solve every task independently, and reject it if the answers differ."""
    solutions: int | None = Field(None, ge=1, le=20)
    """Number of independent solutions that must agree. Default: 1 from documents, 3 from samples only."""
    near_duplicate_threshold: float = Field(0.8, gt=0, le=1)
    """Share of words and pairs of words at which two questions are near-duplicates."""
    numbers_tell_apart: bool = True
    """Treat two questions as different if each has a number that the other lacks."""
    near_in_meaning: Meaning | None = None
    """Also compare questions by meaning."""
    leak_threshold: float = Field(0.6, gt=0, le=1)
    """Similarity at which two questions must be on the same side of the split. Variations are useful for training, but
    a validation question should not be a variation of a training question."""
    chunk_characters: int = Field(3000, ge=200)
    """Maximum characters of a passage."""
    folder: str | None = None
    """Output folder, relative to the experiment file. Default: `generated/<name of the experiment>`."""
    on_bad_document: Literal["stop", "skip"] = "stop"
    """Handling of unreadable documents. Skipped documents are listed in the report."""
    encoding: str | None = None
    """Encoding of text, Markdown and HTML files without a byte order mark. Default: UTF-8."""
    max_file_mb: float = Field(_LIMITS.file_mb, gt=0)
    """Maximum size of a document."""
    max_pages: int = Field(_LIMITS.pages, ge=1)
    """Maximum pages of a PDF."""
    max_characters: int = Field(_LIMITS.characters, ge=1, le=100_000_000)
    """Maximum characters of a document's text."""
    max_seconds: float = Field(_LIMITS.seconds, ge=1)
    """Maximum processor time for reading a document."""
    max_memory_mb: int = Field(_LIMITS.memory_mb, ge=256)
    """Maximum memory for reading a document."""
    seed: int = 0
    """Seed for the order of passages and samples, and for the split."""

    @model_validator(mode="before")
    @classmethod
    def _older_spellings(cls, data: Any) -> Any:
        return todays(data) if isinstance(data, Mapping) else data

    @model_validator(mode="after")
    def _has_material(self) -> DataGenerationConfig:
        if not self.documents and self.seeds is None:
            raise ValueError("set documents (files or folders), seeds (a JSON Lines file of samples), or both")
        if self.use_seeds != "examples" and self.seeds is None:
            raise ValueError(f"use_seeds: {self.use_seeds} requires seeds")
        return self

    @property
    def limits(self) -> Limits:
        """Return the limits of a document."""
        return Limits(**{each.name: getattr(self, f"max_{each.name}") for each in fields(Limits)})

    @property
    def independent_solutions(self) -> int:
        """Return the number of solutions to request, or 0 without checks."""
        return 0 if not self.check else self.solutions or (1 if self.documents else 3)
