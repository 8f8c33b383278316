"""The tasks of an experiment: read once, and drawn in an order that depends only on the seed.

The draws of a run form an endless stream of epochs. Each epoch is a permutation that depends only on the seed and the
epoch's number. The state is therefore a position and the few returned draws, and a resumed run draws exactly the same
tasks. A batch may span two epochs; no task is skipped.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from astuner.contracts.errors import AstunerError, DataError
from astuner.contracts.types import Split, Task
from astuner.plugins.user_code import raised_at
from astuner.rollout.parts import build_task_reader
from astuner.runs.fingerprint import describe_count

if TYPE_CHECKING:
    from astuner.config import Config


@dataclass(frozen=True, kw_only=True)
class TaskSet:
    """Training and validation tasks from a task reader."""

    train: Sequence[Task]
    validation: Sequence[Task]
    """The first `data.max_validation_tasks` validation tasks."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Lines that could not be read (`data.on_bad_line: skip`): place -> reason."""
    checked: Mapping[str, Any] = field(default_factory=dict)
    """Findings of the part ``task_check``."""

    def counts(self, *, noun: str = "") -> str:
        """Return the numbers of distinct tasks: ``20 to train on (each 100 times), 4 to validate on``.

        :param noun: Name of the training tasks, for example ``tasks``.
        """
        train = describe_count(self.train, f"{noun} to train on".strip())
        return f"{train}, {describe_count(self.validation, 'to validate on')}"


def read_tasks(config: Config, *, dry_run: bool = False) -> TaskSet:
    """Build the task reader and read both splits.

    :param dry_run: Only describe the tasks that a reader would generate.
    :raises DataError: A task cannot be read, or the reader failed; the message names the reader.
    """
    return tasks_of(build_task_reader(config, dry_run=dry_run), config)


def tasks_of(reader: Any, config: Config) -> TaskSet:
    """Read both splits from a task reader; raises as `read_tasks`."""
    train, validation = _read(reader, Split.TRAIN), _read(reader, Split.VALIDATION)
    return TaskSet(
        train=train,
        validation=validation[: config.astuner.data.max_validation_tasks],
        skipped=dict(getattr(reader, "skipped", {})),
    )


def planned_steps(config: Config, tasks: int) -> int:
    """Return the number of steps of a run over ``tasks`` training tasks.

    This is `total_steps` if it is set, otherwise `total_epochs` over the tasks. If the file sets both, it is the
    smaller one.
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
    except Exception as e:  # user code may raise anything
        raise DataError(f"{name} failed on the split {split.value!r}: {type(e).__name__}: {e}{raised_at(e)}") from e
    for task in tasks:
        if not isinstance(task, Task):
            raise DataError(f"{name} yielded {task!r}; it must yield astuner.Task")
    return tasks


class TaskSampler:
    """Draw batches of training tasks. Every draw is a separate group, even of the same task."""

    def __init__(self, tasks: Sequence[Task], *, seed: int, shuffle: bool = True) -> None:
        if not tasks:
            raise DataError("no training tasks: the task reader yielded nothing for the split 'train'")
        self._tasks = tasks
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = -1
        self._order: list[int] = []
        self.position = 0
        """Draws so far, over all epochs."""
        self._returned: deque[tuple[int, int]] = deque()
        """Draws to repeat: (position, number of earlier draws)."""

    @property
    def tasks(self) -> int:
        """Number of distinct tasks."""
        return len(self._tasks)

    def first(self, n: int) -> list[tuple[str, Task]]:
        """Return the first ``n`` tasks in the reader's order, as draws, without moving the stream."""
        return [(f"d{i:07d}", task) for i, task in enumerate(self._tasks[:n])]

    def draw(self, n: int) -> list[tuple[str, Task]]:
        """Return the next ``n`` draws as (group ID, task). Returned draws come first."""
        return [self._next() for _ in range(n)]

    def give_back(self, group_ids: Iterable[str]) -> None:
        """Return cancelled draws to the stream, so that slow tasks are not lost from an epoch."""
        self._returned.extend(map(_given_back, group_ids))

    def state(self, under_way: Iterable[str] = ()) -> dict[str, Any]:
        """Return the state for `restore`, which is JSON-serializable.

        :param under_way: Draws in progress that will not be restored; they are drawn again.
        """
        returned = [*self._returned, *map(_given_back, under_way)]
        return {"position": self.position, "returned": [list(r) for r in returned]}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.position = state["position"]
        self._returned = deque((position, times) for position, times in state["returned"])

    def _next(self) -> tuple[str, Task]:
        if self._returned:
            position, times = self._returned.popleft()
            return f"g{position:07d}.{times}", self._task_at(position)
        self.position += 1
        return f"g{self.position - 1:07d}", self._task_at(self.position - 1)

    def _task_at(self, position: int) -> Task:
        epoch, offset = divmod(position, len(self._tasks))
        if epoch != self._epoch:
            self._order = list(range(len(self._tasks)))
            if self._shuffle:
                random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
            self._epoch = epoch
        return self._tasks[self._order[offset]]


def _given_back(group_id: str) -> tuple[int, int]:
    """Return (position, number of earlier draws) of a draw to repeat."""
    position, _, times = group_id.lstrip("g").partition(".")
    return int(position), int(times or 0) + 1
