"""`check_task_reader`: does a task reader keep to the contract of `astuner.TaskReader`?"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any

from astuner.contracts.types import Split, Task


def check_task_reader(
    reader: Any, *, splits: Sequence[Split] = (Split.TRAIN, Split.VALIDATION), first: int = 200
) -> list[Task]:
    """Check the first tasks of every split, and return those of the first one.

    - ``read`` is lazy: it returns an iterator, not a list;
    - every item is a `Task` with a label, something to ask, and data that JSON can hold;
    - reading again gives the same tasks in the same order (a resumed run depends on it);
    - two readings at the same time do not disturb each other.
    """
    name = type(reader).__name__
    found: dict[Split, list[Task]] = {}
    for split in splits:
        reading = reader.read(split)
        assert isinstance(reading, Iterator), (
            f"{name}.read({split}) returned a {type(reading).__name__}; yield the tasks instead"
        )
        tasks = found[split] = list(islice(reading, first))
        assert tasks, f"{name}.read({split}) yields no task; raise DataError when there should be some"
        for i, task in enumerate(tasks):
            _check_task(f"task {i} of {name}.read({split})", task)
        other = reader.read(split)
        again = []
        for task in islice(reader.read(split), first):
            next(other, None)  # in step with a second reading
            again.append(task)
        different = [i for i, (a, b) in enumerate(zip(tasks, again, strict=False)) if a != b]
        assert again == tasks, (
            f"{name}.read({split}) gave other tasks the second time (first difference: number "
            f"{different[0] if different else min(len(tasks), len(again))}); read in a stable order and do not shuffle"
        )
    return found[splits[0]]


def _check_task(where: str, task: Any) -> None:
    assert isinstance(task, Task), f"{where} is {task!r}; yield astuner.Task(task_id=…, main_query=…)"
    assert isinstance(task.task_id, str), f"{where} has the task_id {task.task_id!r}; make it text"
    assert task.task_id, f"{where} has no task_id; it is a label for people and logs"
    assert task.main_query or task.init_messages, (
        f"{where} ({task.task_id}) asks nothing; set main_query or init_messages"
    )
    try:
        json.dumps(asdict(task))
    except (TypeError, ValueError) as e:
        raise AssertionError(
            f"{where} ({task.task_id}) does not fit into JSON: {e}; keep metadata to plain data"
        ) from e
