"""Read tasks from Hugging Face data sets: a folder, a file, or a name on the Hub.

Local files take precedence over names on the Hub. Code from the Hub never runs. Rows keep their stored order. Typed
files (Parquet, Arrow) are memory-mapped; CSV and JSON files are read without guessing types
(`astuner_datasets.text_files`).
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from astuner.contracts.building import BuildContext
from astuner.contracts.errors import DataError, MissingDependency
from astuner.contracts.rows import BadRow, FieldMap
from astuner.contracts.section import Section
from astuner.contracts.task_reader import TaskReader
from astuner.contracts.types import Split, Task
from astuner_datasets.text_files import TextFiles, guessed_column
from astuner_models.hub import hub_downloads, hub_problem

_LEGACY = {
    "gsm8k": ("openai/gsm8k", "main"),
    "gsm8k/main": ("openai/gsm8k", "main"),
    "gsm8k/socratic": ("openai/gsm8k", "socratic"),
}
"""Names of data sets without an owner, from older versions of the hub: name/subset -> current (name, subset)."""
_FORMATS: dict[str, tuple[str, dict[str, str]]] = {
    ".parquet": ("parquet", {}),
    ".jsonl": ("json", {}),
    ".json": ("json", {}),
    ".ndjson": ("json", {}),
    ".csv": ("csv", {}),
    ".tsv": ("csv", {"sep": "\t"}),
    ".arrow": ("arrow", {}),
}
"""File suffix -> builder of `datasets`, and its options."""


class HuggingFaceConfig(Section):
    """Settings of the task reader ``huggingface``."""

    dataset_path: str = Field(min_length=1)
    """Folder (from `save_to_disk`, or with data files), file (Parquet, CSV, TSV, JSON, Arrow), or name on the Hub such
    as `openai/gsm8k`."""
    name: str | None = None
    """Subset (configuration) of the data set, such as `main`."""
    revision: str | None = None
    """Branch, tag or commit on the Hub. A commit makes the run reproducible."""
    training_split: str = "train"
    """Split to train on. `train[:1000]` works unless the data set is from `save_to_disk`."""
    validation_split: str | None = None
    """Split to validate on; None for no validation."""
    query_field: str | None = None
    """Column with the query; None uses the first of main_query, question, problem, query, prompt."""
    id_field: str | None = None
    """Column with the task ID; None uses task_id or id, otherwise split and row number."""


class HuggingFaceTaskReader(TaskReader):
    """Reads the two splits. Each is opened on first use.

    :param base_dir: Base folder of relative local paths; None for the working directory.
    :param on_bad_line: ``stop`` raises `DataError` for a row that is not a task; ``skip`` omits it.
    """

    config: HuggingFaceConfig

    def __init__(
        self, config: HuggingFaceConfig, base_dir: Path | None = None, on_bad_line: Literal["stop", "skip"] = "stop"
    ) -> None:
        super().__init__(config)
        self._base_dir = base_dir or Path()
        self._on_bad_line = on_bad_line
        self._opened: dict[str, Any] = {}
        self._text_files: TextFiles | None = None
        self.skipped: dict[str, str] = {}
        """Place (``name[split] row n``) -> fault of every skipped row."""

    @classmethod
    def missing(cls, section: HuggingFaceConfig | None, base_dir: Path) -> tuple[str, str]:
        return "dataset_path", why_no_data_set(section.dataset_path, base_dir) if section else ""

    @property
    def elsewhere(self) -> str:
        name = self.config.dataset_path
        return "" if (self._base_dir / Path(name).expanduser()).exists() else f"the Hugging Face hub ({name})"

    @classmethod
    def from_config(cls, section: Any, context: BuildContext) -> HuggingFaceTaskReader:
        return cls(section, context.base_dir, context.config.astuner.data.on_bad_line)

    def read(self, split: Split) -> Iterator[Task]:
        """Yield the tasks of a split in stored order; none without a validation split.

        :raises DataError: The data set cannot be opened, has no tasks, or (on_bad_line: stop) has an invalid row.
        :raises MissingDependency: The package ``datasets`` is not installed.
        """
        wanted = self.config.training_split if split is Split.TRAIN else self.config.validation_split
        if wanted is None:
            return
        if wanted not in self._opened:
            self._opened[wanted] = self._open(wanted)
        fields = FieldMap(self.config.query_field, self.config.id_field)
        tasks = 0
        for number, row in enumerate(self._opened[wanted]):
            try:
                if isinstance(row, BadRow):
                    raise row
                task = fields.task(row, f"{wanted}:{number}")
            except BadRow as e:
                self._refuse(f"{self.config.dataset_path}[{wanted}] row {number}", str(e))
                continue
            tasks += 1
            yield task
        if not tasks:
            raise DataError(
                f"{self.config.dataset_path}[{wanted}] has no usable task in {len(self._opened[wanted])} rows"
            )

    def _refuse(self, place: str, fault: str) -> None:
        if self._on_bad_line == "stop":
            raise DataError(f"{place}: {fault}. Correct the row, or set astuner.data.on_bad_line: skip")
        self.skipped[place] = fault

    def _open(self, split: str) -> Any:
        local = self._base_dir / Path(self.config.dataset_path).expanduser()
        if reason := why_no_data_set(self.config.dataset_path, self._base_dir):
            raise DataError(reason)
        try:
            import datasets
        except ImportError as e:
            raise MissingDependency(
                'the task reader "huggingface" requires the package datasets, which is not installed; '
                "install it with: pip install astuner-datasets"
            ) from e
        try:
            if not local.exists():
                return self._from_hub(datasets, split)
            if (local / "state.json").is_file() or (local / "dataset_dict.json").is_file():
                return _saved(datasets.load_from_disk(str(local)), local, split)
            return self._from_files(datasets, local, split)
        except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as e:
            raise DataError(
                f"cannot open split {split!r} of {self.config.dataset_path}: {_reason(e)}. {self._advice(local)}"
            ) from e

    def _from_hub(self, datasets: Any, split: str) -> Any:
        name, subset = hub_name(self.config.dataset_path)
        subset, revision = self.config.name or subset, self.config.revision
        builder = _offline_text_files(datasets, name, subset, revision) if datasets.config.HF_HUB_OFFLINE else None
        return self._rows(builder or _builder(datasets, name, subset, revision=revision), split)

    def _from_files(self, datasets: Any, local: Path, split: str) -> Any:
        if local.is_dir():
            return self._rows(_builder(datasets, str(local), self.config.name), split)
        if local.suffix not in _FORMATS:
            raise ValueError(f"{local.suffix or 'no suffix'} is not a supported file type ({', '.join(_FORMATS)})")
        kind, options = _FORMATS[local.suffix]
        return self._rows(_builder(datasets, kind, data_files=str(local), **options), split)

    def _rows(self, builder: Any, split: str) -> Any:
        """Return the rows of a split: unconverted for files without types, otherwise as prepared by `datasets`."""
        if TextFiles.reads(builder):
            if self._text_files is None:
                self._text_files = TextFiles(builder)
            return self._text_files.rows(split)
        builder.download_and_prepare()
        rows = builder.as_dataset(split=split)
        if guess := guessed_column(rows):
            column, dtype = guess
            raise DataError(
                f"column {column!r} of {self.config.dataset_path} was converted from text to {dtype} by an earlier "
                f"download (row 0 now has {rows[0][column]!r}), and the original files are not on this machine. "
                "Run once with access to the hub"
            )
        return rows

    def _advice(self, local: Path) -> str:
        if local.exists():
            return "Check the name of the split and the files"
        return f"{local} does not exist, so it is used as a name on the Hub: check name, subset (name:) and split"


def why_no_data_set(path: str, base_dir: Path) -> str:
    """Return why a data set is not available and which ones are, or an empty string if it is available.

    :param path: Path or name as in ``dataset_path``, relative to ``base_dir``.
    """
    if (base_dir / Path(path).expanduser()).exists() or not (reason := hub_problem(hub_name(path)[0], _prepared())):
        return ""
    return (
        f"astuner.task_reader.huggingface.dataset_path is {path}, which is not on this machine, and {reason}. Local "
        f"data sets: {', '.join(_prepared()) or 'none'}. Read tasks from a file (task_reader.type: jsonl), or save the "
        "data set on a connected machine (load_dataset(...).save_to_disk(FOLDER)), copy the folder and set its path"
    )


def hub_name(path: str) -> tuple[str, str | None]:
    """Return the hub name of a data set and its subset; ``gsm8k/main`` and ``openai/gsm8k/main`` are equal."""
    if path in _LEGACY:
        return _LEGACY[path]
    owner, _, rest = path.partition("/")
    name, _, subset = rest.partition("/")
    return (f"{owner}/{name}" if name else owner), subset or None


def _offline_text_files(datasets: Any, name: str, subset: str | None, revision: str | None) -> Any:
    """Return a builder of downloaded CSV or JSON files of a data set on the hub, or None.

    Offline, ``datasets`` finds only data sets that it has prepared, and text files are not prepared.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = snapshot_download(name, repo_type="dataset", revision=revision, local_files_only=True)
        builder = _builder(datasets, folder, subset)
    except (LocalEntryNotFoundError, OSError, ValueError, datasets.exceptions.DatasetsError):
        return None  # not downloaded, or other file types
    return builder if TextFiles.reads(builder) else None


def _builder(datasets: Any, *named: Any, **options: Any) -> Any:
    """Return the result of ``datasets.load_dataset_builder`` without running a data set's loading script.

    Version 3 of ``datasets`` asks on stdin whether to run it; version 4 never runs it.
    """
    if "trust_remote_code" in inspect.signature(datasets.load_dataset_builder).parameters:
        options["trust_remote_code"] = False
    return datasets.load_dataset_builder(*named, **options)


def _prepared() -> list[str]:
    """Return the names of downloaded data sets, from the caches of the hub and of the package datasets."""
    from huggingface_hub import constants

    prepared = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME) / "datasets")
    made = {p.name.replace("___", "/") for p in prepared.glob("*") if p.is_dir() and p.name != "downloads"}
    return sorted({*hub_downloads("dataset"), *made})


def _saved(opened: Any, local: Path, split: str) -> Any:
    """Return a split of a data set from `save_to_disk`, which has either one unnamed split or several named ones."""
    if not isinstance(opened, dict):
        if opened.split is None or str(opened.split) == split:
            return opened
        raise ValueError(f"{local} contains the split {opened.split}")
    if split not in opened:
        raise ValueError(f"its splits are {', '.join(opened)}")
    return opened[split]


def _reason(e: Exception) -> str:
    """Return the first lines of an error and of its cause, which is often the useful one in `datasets`."""
    lines = [str(x).strip().splitlines()[0] for x in (e, e.__cause__) if x is not None and str(x).strip()]
    return "; caused by ".join(dict.fromkeys(lines)) or type(e).__name__
