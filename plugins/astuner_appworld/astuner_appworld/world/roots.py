"""AppWorld's data folder, and the small one that an instance gets.

``APPWORLD_ROOT`` names the folder that holds ``data/``.  The world of an instance is built from a folder of its own,
which links to what a world needs (base databases, API documents, the task's own databases) and to nothing else, so that
no ground truth is below it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

ROOT_VARIABLE = "APPWORLD_ROOT"
SPLITS = ("train", "dev", "test_normal", "test_challenge")
EXPERIMENT = "run"
"""AppWorld's word for the folder of a run's outputs; every instance has a root of its own, so one name is enough."""
_TASK_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


class NoData(RuntimeError):
    """There is no AppWorld data where it should be."""


def data_root(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder that holds ``data/``.

    :raises NoData: the variable is not set, there is nothing there, or AppWorld would misread the path.
    """
    value = environ.get(ROOT_VARIABLE, "")
    if not value:
        raise NoData(f"{ROOT_VARIABLE} is not set; type: astuner env setup appworld root=FOLDER")
    root = Path(value)
    if not (root / "data" / "datasets").is_dir() or not (root / "data" / "base_dbs").is_dir():
        raise NoData(f"{root} holds no AppWorld data (data/datasets, data/base_dbs); type: astuner env setup appworld")
    _refuse_memory(root.resolve())
    return root


def split_counts(root: Path) -> dict[str, int]:
    """Every split that is there, and how many tasks it has."""
    files = sorted((root / "data" / "datasets").glob("*.txt"))
    return {file.stem: len(_lines(file)) for file in files}


def task_ids(root: Path, split: str) -> list[str]:
    """:raises ValueError: there is no such split."""
    there = split_counts(root)
    if split not in there:
        raise ValueError(f"AppWorld has no split {split!r} in {root}; there are {', '.join(there) or 'none'}")
    return _lines(root / "data" / "datasets" / f"{split}.txt")


def task_folder(root: Path, task_id: str) -> Path:
    """:raises ValueError: there is no such task."""
    if not _TASK_ID.fullmatch(task_id) or not (root / "data" / "tasks" / task_id / "specs.json").is_file():
        raise ValueError(f"AppWorld has no task {task_id[:80]!r} in {root}")
    return root / "data" / "tasks" / task_id


def make_world_root(root: Path, task_id: str, folder: Path) -> Path:
    """A root for one world in ``folder``: links to what it needs, room for what it writes, and no ground truth."""
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
    """A root for evaluating what the world in ``folder`` wrote: all data, ground truth included."""
    own = folder / "evaluation"
    if not own.exists():
        own.mkdir()
        (own / "data").symlink_to(root.resolve() / "data")
        (own / "experiments").symlink_to(folder / "world" / "experiments")
    return own


def what_a_world_reads(root: Path, task_id: str) -> tuple[str, ...]:
    """The files behind the links of `make_world_root`."""
    source, task = root.resolve() / "data", task_folder(root.resolve(), task_id)
    return tuple(str(path) for path in (source / "base_dbs", source / "api_docs", task / "specs.json", task / "dbs"))


def _refuse_memory(path: Path) -> None:
    """The package takes such a path for the name of an in-memory database."""
    if "memory" in str(path):
        raise NoData(f"AppWorld cannot use a folder with 'memory' in its path: {path}")


def _lines(file: Path) -> list[str]:
    return [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
