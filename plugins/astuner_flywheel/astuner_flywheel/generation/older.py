"""AgentJet's spellings of this section, in today's words.

``document_reader.document_path``, ``query_reader`` and ``task_num`` mean the same here and are taken over.  A key that
means something else here, or nothing, is refused by name with what to write: none is ignored in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_HARMLESS = {"cache_enabled", "languages", "split_by"}
"""Of ``document_reader``: what was read is kept anyway, only scans need languages, and passages end at sentences."""
INSTEAD = {
    "llm_model": "write helper_model: NAME, and the model into astuner.helper_models.NAME",
    "llm_response_length": "write astuner.helper_models.NAME.max_tokens",
    "num_workers": "write astuner.helper_models.NAME.concurrency",
    "sampling_params": "write temperature",
    "deduplication_filter": (
        "write near_duplicate_threshold (by words), and near_in_meaning: {helper_model: NAME, threshold: 0.8} for a "
        "comparison by embeddings"
    ),
}
"""A key of theirs -> what does that here."""


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
