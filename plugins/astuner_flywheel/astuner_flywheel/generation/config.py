"""The section ``astuner.task_reader.data_generation``: what new tasks are made from, and how they are checked.

Older spellings (AgentJet's: ``document_reader.document_path``, ``query_reader``, ``task_num``) are taken over where
they mean the same; a key that means something else here, or nothing, is refused by name with what to
write.  Invariant: what is accepted here can be planned without asking anybody.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal

from pydantic import AliasChoices, Field, model_validator

from astuner.contracts.section import Section
from astuner_flywheel.documents.document import Limits

_HARMLESS = {"cache_enabled", "languages", "split_by"}
"""Of ``document_reader``: what was read is kept anyway, only scans need languages, and passages end at sentences."""


def todays(data: Mapping[str, Any]) -> dict[str, Any]:
    """The section with older spellings replaced.

    :raises ValueError: an older key that has no equal here, or two spellings of one key.
    """
    new = dict(data)
    if isinstance(reader := new.get("document_reader"), Mapping):
        new.pop("document_reader")
        unknown = sorted(set(reader) - _HARMLESS - {"document_path", "chunk_size"})
        if unknown:
            raise ValueError(f"document_reader.{unknown[0]} has no equal here; write documents: [paths]")
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
        raise ValueError("samples are read from a JSON Lines file: write seeds: samples.jsonl instead of query_reader")
    return path


def _put(data: dict[str, Any], name: str, value: Any, older: str) -> None:
    if name in data:
        raise ValueError(f"{older} is the older name of {name}, which is set too; keep one of them")
    data[name] = value


_LIMITS = Limits()


class Meaning(Section):
    helper_model: str = Field(min_length=1)
    """The helper model whose server has embeddings (`/v1/embeddings`)."""
    threshold: float = Field(0.92, gt=0, le=1)
    """Cosine from which on two questions mean the same; where it lies depends on the model."""


class DataGenerationConfig(Section):
    """New tasks from documents, from samples, or from both: then the samples show what a task looks like."""

    helper_model: str = Field(min_length=1)
    """Who writes and checks the tasks: a name of `astuner.helper_models`."""
    documents: list[str] = Field([], validation_alias=AliasChoices("documents", "document_reader"))
    """Files, folders (with all below) or patterns such as `manuals/**/*.pdf`, relative to the experiment file."""
    seeds: str | None = Field(None, validation_alias=AliasChoices("seeds", "query_reader"))
    """A JSON Lines file with sample tasks; relative to the experiment file."""
    query_field: str | None = None
    """The samples' field with the question; null takes the first of main_query, question, problem, query, prompt."""
    answer_field: str = Field("answer", min_length=1)
    """The samples' field with the answer."""
    tasks: int = Field(100, ge=1, validation_alias=AliasChoices("tasks", "task_num"))
    """How many to make; fewer come out where documents or samples do not give that many that differ."""
    validation_share: float = Field(0.1, ge=0, lt=1)
    """The share kept for validation; near-duplicates are always on one side."""
    use_seeds: Literal["examples", "train", "validation"] = "examples"
    """Whether the samples also become tasks, and of which side; `validation` validates on them alone."""
    instructions: str = ""
    """What the tasks should be like, in your own words: difficulty, style, the form of the answer."""
    language: str = ""
    """The language of the tasks, e.g. `German`; empty takes that of the document or the samples."""
    temperature: float = Field(0.8, ge=0)
    """Sampling temperature of the writing."""
    per_call: int = Field(5, ge=1, le=50)
    """Tasks asked for in one request."""
    rounds: int = Field(3, ge=1)
    """How often a passage is asked for more (or, from samples, so many times the requests that should do)."""
    max_question_characters: int = Field(2000, ge=1)
    """A longer question is rejected."""
    max_answer_characters: int = Field(500, ge=1)
    """A longer answer is rejected."""
    check: bool = True
    """Have every answer worked out again, independently, and reject the task if that disagrees."""
    solutions: int | None = Field(None, ge=1, le=20)
    """Independent solutions that must all agree; null is 1 from documents, where the passage decides, and 3 without."""
    near_duplicate_threshold: float = Field(0.8, gt=0, le=1)
    """Share of words and pairs of words that two questions must have in common to count as one."""
    numbers_tell_apart: bool = True
    """Questions that each have a number which the other lacks are different, however alike the rest is."""
    near_in_meaning: Meaning | None = None
    """Compare by meaning too."""
    leak_threshold: float = Field(0.6, gt=0, le=1)
    """From this likeness on two questions are on one side of the split: variations are good to train on, but a
    validation question should be no variation of a training question."""
    chunk_characters: int = Field(3000, ge=200)
    """The longest passage that is shown at once."""
    folder: str | None = None
    """Where everything is kept, relative to the experiment file; null is `generated/<name of the experiment>`."""
    on_bad_document: Literal["stop", "skip"] = "stop"
    """What a document that cannot be read does; one that is skipped is named in the report."""
    encoding: str | None = None
    """Of text, Markdown and HTML files without a mark of their own; null is UTF-8."""
    max_file_mb: float = Field(_LIMITS.file_mb, gt=0)
    """A larger document is refused."""
    max_pages: int = Field(_LIMITS.pages, ge=1)
    """A PDF with more pages is refused."""
    max_characters: int = Field(_LIMITS.characters, ge=1, le=100_000_000)
    """A document with more text is refused."""
    max_seconds: float = Field(_LIMITS.seconds, ge=1)
    """Processor time that reading one document may take."""
    max_memory_mb: int = Field(_LIMITS.memory_mb, ge=256)
    """Memory that reading one document may take."""
    seed: int = 0
    """Of the order in which passages and samples are drawn, and of the split."""

    @model_validator(mode="before")
    @classmethod
    def _older_spellings(cls, data: Any) -> Any:
        return todays(data) if isinstance(data, Mapping) else data

    @model_validator(mode="after")
    def _has_material(self) -> DataGenerationConfig:
        if not self.documents and self.seeds is None:
            raise ValueError("give it documents (files or folders), seeds (a JSON Lines file of samples), or both")
        if self.use_seeds != "examples" and self.seeds is None:
            raise ValueError(f"use_seeds: {self.use_seeds} needs seeds")
        return self

    @property
    def limits(self) -> Limits:
        """What one document may be and take."""
        return Limits(**{each.name: getattr(self, f"max_{each.name}") for each in fields(Limits)})

    @property
    def independent_solutions(self) -> int:
        """How many are asked for; 0 where nothing is checked."""
        return 0 if not self.check else self.solutions or (1 if self.documents else 3)
