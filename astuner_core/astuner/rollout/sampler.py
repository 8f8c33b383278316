"""Which tasks come next.

The draws of a run are one endless stream: epoch after epoch, each a permutation that depends only on the seed and
the epoch's number.  So the whole state is one position, and a resumed run draws exactly what the first one would
have drawn.  A batch may span two epochs; no task is left over.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from astuner.errors import DataError
from astuner.types import Task


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
        """Draws so far, over all epochs; the state to save and to restore."""

    @property
    def tasks(self) -> int:
        """How many different tasks there are."""
        return len(self._tasks)

    def first(self, n: int) -> list[tuple[str, Task]]:
        """The first ``n`` tasks in the reader's order, as draws; does not move the stream."""
        return [(f"d{i:07d}", task) for i, task in enumerate(self._tasks[:n])]

    def draw(self, n: int) -> list[tuple[str, Task]]:
        """The next ``n`` draws as (group id, task)."""
        return [self._next() for _ in range(n)]

    def _next(self) -> tuple[str, Task]:
        epoch, offset = divmod(self.position, len(self._tasks))
        if epoch != self._epoch:
            self._order = list(range(len(self._tasks)))
            if self._shuffle:
                random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
            self._epoch = epoch
        group_id = f"g{self.position:07d}"
        self.position += 1
        return group_id, self._tasks[self._order[offset]]
