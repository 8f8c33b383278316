"""Tasks that are made from a seed: ``name:seed``, where the seed's million says which split it belongs to.

Invariant: the seeds of two splits are disjoint, so no task of one split is in another.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from astuner.contracts.types import Task

BAND = 1_000_000
"""How many seeds each split has."""
SPLITS = ("train", "validation", "test")
"""In the order of their bands: 0 to 999999 is train, and so on."""
LISTED = {"train": 10_000, "validation": 256, "test": 256}
"""How many tasks a split lists, if the parameter ``tasks`` does not say."""
TASK_IDS = (
    f"NAME:SEED; train has the seeds from 0, validation those from {BAND}, test those from {2 * BAND}, {BAND} each"
)

_TASK_ID = re.compile(r"([A-Za-z0-9._-]+):(0|[1-9][0-9]{0,6})")


def read_params(given: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters with their defaults filled in.

    :param known: name -> default; a value must have the type of its default.
    :raises ValueError: an unknown name, or a value of another type.
    """
    known = {"tasks": 0, **known}
    for name, value in given.items():
        if name not in known:
            raise ValueError(f"there is no parameter {name!r}; there are {', '.join(sorted(known))}")
        if type(value) is not type(known[name]) and not (isinstance(known[name], float) and type(value) is int):
            kind = type(known[name]).__name__
            raise ValueError(f"the parameter {name!r} is {value!r}; it must be of the type {kind}")
    return {**known, **given}


def list_tasks(names: Sequence[str], split: str, limit: int) -> Iterator[Task]:
    """The first tasks of a split, the names in turn.

    :param limit: how many; 0 takes the split's usual number.
    :raises ValueError: there is no such split.
    """
    if split not in SPLITS:
        raise ValueError(f"there is no split {split!r}; there are {', '.join(SPLITS)}")
    if not 0 <= limit <= BAND:
        raise ValueError(f"the parameter 'tasks' is {limit}; it must be between 0 (as usual) and {BAND}")
    first = SPLITS.index(split) * BAND
    return (Task(task_id=f"{names[n % len(names)]}:{first + n}") for n in range(limit or LISTED[split]))


def parse_task_id(task_id: str) -> tuple[str, int]:
    """Name and seed of a task.

    :raises ValueError: it is not such an id.
    """
    match = _TASK_ID.fullmatch(task_id)
    if match is None or int(match[2]) >= len(SPLITS) * BAND:
        raise ValueError(f"there is no task {task_id!r}; a task is {TASK_IDS}")
    return match[1], int(match[2])


def split_of(seed: int) -> str:
    """The split that a task's seed belongs to."""
    return SPLITS[seed // BAND]
