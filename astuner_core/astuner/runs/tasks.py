"""The tasks of an experiment, read once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from astuner.contracts.errors import AstunerError, DataError
from astuner.contracts.types import Split, Task
from astuner.plugins.user_code import place
from astuner.rollout.parts import build_task_reader

if TYPE_CHECKING:
    from astuner.config import Config


@dataclass(frozen=True, kw_only=True)
class TaskSet:
    """What a task reader yields."""

    train: Sequence[Task]
    validation: Sequence[Task]
    """The first `data.max_validation_tasks` of them."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Lines that could not be read (`data.on_bad_line: skip`): place -> reason."""


def read_tasks(config: Config, *, dry_run: bool = False) -> TaskSet:
    """Build the task reader and read both splits.

    :param dry_run: only to show what would happen: a reader that would make its tasks first says so instead.
    :raises DataError: a task cannot be read, or the reader itself failed; names the reader.
    """
    return tasks_of(build_task_reader(config, dry_run=dry_run), config)


def tasks_of(reader: Any, config: Config) -> TaskSet:
    """Both splits of a task reader that was built; raises as `read_tasks`."""
    train, validation = _read(reader, Split.TRAIN), _read(reader, Split.VALIDATION)
    return TaskSet(
        train=train,
        validation=validation[: config.astuner.data.max_validation_tasks],
        skipped=dict(getattr(reader, "skipped", {})),
    )


def planned_steps(config: Config, tasks: int) -> int:
    """Steps of a run over ``tasks`` training tasks.

    `total_steps` where it is written, as many epochs as that takes; `total_epochs` over the tasks otherwise; the
    smaller of the two where both are written.
    """
    common = config.astuner.trainer_common
    by_epochs = math.ceil(common.total_epochs * tasks / config.astuner.data.train_batch_size)
    if common.total_steps is None:
        return by_epochs
    if "astuner.trainer_common.total_epochs" not in config.written:
        return common.total_steps
    return min(by_epochs, common.total_steps)


def _read(reader: Any, split: Split) -> list[Task]:
    name = f"the task reader {type(reader).__name__}"
    try:
        tasks = list(reader.read(split))
    except AstunerError:
        raise
    except Exception as e:  # a stranger's reader may raise anything
        raise DataError(f"{name} failed on the split {split.value!r}: {type(e).__name__}: {e}{place(e)}") from e
    for task in tasks:
        if not isinstance(task, Task):
            raise DataError(f"{name} yielded {task!r}; it must yield astuner.Task")
    return tasks
