"""Locate AppWorld's data and create a restricted root for each instance.

``APPWORLD_ROOT`` is the folder that contains ``data/``. The world of an instance uses a separate root with links to
only what a world needs (base databases, API documents, the databases of the task), so it contains no ground truth.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

ROOT_VARIABLE = "APPWORLD_ROOT"
SPLITS = ("train", "dev", "test_normal", "test_challenge")
EXPERIMENT = "run"
"""AppWorld's name for the output folder of a run; every instance has its own root, so one name is enough."""
_TASK_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


class NoData(RuntimeError):
    """Raised if AppWorld's data is missing."""


def data_root(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder that contains ``data/``.

    :raises NoData: The variable is not set, the data is missing, or AppWorld cannot use the path.
    """
    value = environ.get(ROOT_VARIABLE, "")
    if not value:
        raise NoData(f"{ROOT_VARIABLE} is not set. Run: astuner env setup appworld root=FOLDER")
    root = Path(value)
    if not (root / "data" / "datasets").is_dir() or not (root / "data" / "base_dbs").is_dir():
        raise NoData(f"{root} has no AppWorld data (data/datasets, data/base_dbs). Run: astuner env setup appworld")
    _refuse_memory(root.resolve())
    return root


def split_counts(root: Path) -> dict[str, int]:
    """Return the number of tasks of every available split."""
    files = sorted((root / "data" / "datasets").glob("*.txt"))
    return {file.stem: len(_lines(file)) for file in files}


def task_ids(root: Path, split: str) -> list[str]:
    """Return the task IDs of a split.

    :raises ValueError: The split does not exist.
    """
    there = split_counts(root)
    if split not in there:
        raise ValueError(f"unknown split {split!r} in {root}; available splits: {', '.join(there) or 'none'}")
    return _lines(root / "data" / "datasets" / f"{split}.txt")


def task_folder(root: Path, task_id: str) -> Path:
    """Return the folder of a task.

    :raises ValueError: The task does not exist.
    """
    if not _TASK_ID.fullmatch(task_id) or not (root / "data" / "tasks" / task_id / "specs.json").is_file():
        raise ValueError(f"unknown AppWorld task {task_id[:80]!r} in {root}")
    return root / "data" / "tasks" / task_id


def make_world_root(root: Path, task_id: str, folder: Path) -> Path:
    """Create a root for one world in ``folder``, with links to its data, an output folder and no ground truth."""
    source, task, own = root.resolve() / "data", task_folder(root.resolve(), task_id), folder / "world"
    _refuse_memory(own)
    (own / "data" / "tasks" / task_id).mkdir(parents=True)
    (own / "experiments").mkdir()
    for name in ("base_dbs", "api_docs"):
        (own / "data" / name).symlink_to(source / name)
    for name in ("specs.json", "dbs"):
        (own / "data" / "tasks" / task_id / name).symlink_to(task / name)
    return own


def make_evaluation_root(root: Path, folder: Path) -> Path:
    """Create a root for evaluating the world in ``folder``, with all data including the ground truth."""
    own = folder / "evaluation"
    if not own.exists():
        own.mkdir()
        (own / "data").symlink_to(root.resolve() / "data")
        (own / "experiments").symlink_to(folder / "world" / "experiments")
    return own


def what_a_world_reads(root: Path, task_id: str) -> tuple[str, ...]:
    """Return the targets of the links that `make_world_root` creates."""
    source, task = root.resolve() / "data", task_folder(root.resolve(), task_id)
    return tuple(str(path) for path in (source / "base_dbs", source / "api_docs", task / "specs.json", task / "dbs"))


def _refuse_memory(path: Path) -> None:
    """Reject a path that the package would treat as an in-memory database."""
    if "memory" in str(path):
        raise NoData(f"AppWorld cannot use a folder with 'memory' in its path: {path}")


def _lines(file: Path) -> list[str]:
    return [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
