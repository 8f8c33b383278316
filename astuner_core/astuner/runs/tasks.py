"""The tasks of an experiment: read once, and drawn in an order that the seed decides.

The draws of a run are one endless stream: epoch after epoch, each a permutation that depends only on the seed and
the epoch's number.  So the state is a position (and the few draws that were given back), and a resumed run draws
exactly what the first one would have drawn.  A batch may span two epochs; no task is left over.
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
    """What a task reader yields."""

    train: Sequence[Task]
    validation: Sequence[Task]
    """The first `data.max_validation_tasks` of them."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Lines that could not be read (`data.on_bad_line: skip`): place -> reason."""
    checked: Mapping[str, Any] = field(default_factory=dict)
    """What the part ``task_check`` found in them."""

    def counts(self, *, noun: str = "") -> str:
        """Return how many different tasks the splits have: ``20 to train on (each 100 times), 4 to validate on``.

        :param noun: what to call the training tasks, such as ``tasks``.
        """
        train = describe_count(self.train, f"{noun} to train on".strip())
        return f"{train}, {describe_count(self.validation, 'to validate on')}"


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
        raise DataError(f"{name} failed on the split {split.value!r}: {type(e).__name__}: {e}{raised_at(e)}") from e
    for task in tasks:
        if not isinstance(task, Task):
            raise DataError(f"{name} yielded {task!r}; it must yield astuner.Task")
    return tasks


class TaskSampler:
    """Draws batches of training tasks; every draw is a group of its own, even of the same task."""

    def __init__(self, tasks: Sequence[Task], *, seed: int, shuffle: bool = True) -> None:
        if not tasks:
            raise DataError("there are no training tasks: the reader yielded nothing for the split 'train'")
        self._tasks = tasks
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = -1
        self._order: list[int] = []
        self.position = 0
        """Draws so far, over all epochs."""
        self._returned: deque[tuple[int, int]] = deque()
        """Draws that come again: (position, how often it was drawn before)."""

    @property
    def tasks(self) -> int:
        """How many different tasks there are."""
        return len(self._tasks)

    def first(self, n: int) -> list[tuple[str, Task]]:
        """The first ``n`` tasks in the reader's order, as draws; does not move the stream."""
        return [(f"d{i:07d}", task) for i, task in enumerate(self._tasks[:n])]

    def draw(self, n: int) -> list[tuple[str, Task]]:
        """The next ``n`` draws as (group id, task); those given back come first."""
        return [self._next() for _ in range(n)]

    def give_back(self, group_ids: Iterable[str]) -> None:
        """These draws were cut short: they come again, so that slow tasks are not left out of an epoch."""
        self._returned.extend(map(_given_back, group_ids))

    def state(self, under_way: Iterable[str] = ()) -> dict[str, Any]:
        """What `restore` needs; JSON-serialisable.

        :param under_way: draws that whoever restores this will not have: they come again.
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
    """A draw that comes again: (position, how often it was drawn before)."""
    position, _, times = group_id.lstrip("g").partition(".")
    return int(position), int(times or 0) + 1
