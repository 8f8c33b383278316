"""Which tasks come next.

The draws of a run are one endless stream: epoch after epoch, each a permutation that depends only on the seed and
the epoch's number.  So the state is a position (and the few draws that were given back), and a resumed run draws
exactly what the first one would have drawn.  A batch may span two epochs; no task is left over.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from astuner.contracts.errors import DataError
from astuner.contracts.types import Task


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
