"""Groups that run before they are wanted, for training that does not wait for its rollouts.

Episodes of a host go on by themselves; what happens on this side (the next episode of a full pool, the end of a group)
happens while the event loop runs, that is while `next_group` is awaited.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from astuner.contracts.types import Split, Task
from astuner.rollout.pool import Group, RolloutPool


class GroupsAhead:
    """Runs training groups in the background of one event loop."""

    def __init__(self, pool: RolloutPool, loop: asyncio.AbstractEventLoop, *, repeat: int) -> None:
        self._pool, self._loop, self._repeat = pool, loop, repeat
        self._running: dict[asyncio.Task[list[Group]], str] = {}

    def begin(self, draws: Sequence[tuple[str, Task]]) -> None:
        """Begin a group for each draw."""
        for draw in draws:
            work = self._pool.run_groups([draw], repeat=self._repeat, split=Split.TRAIN)
            self._running[self._loop.create_task(work)] = draw[0]

    async def next_group(self) -> Group:
        """The next group that ends; those that ended first come first.

        :raises LookupError: none is running.
        """
        if not self._running:
            raise LookupError("no group was begun")
        await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
        done = next(task for task in self._running if task.done())  # the one begun first, of those that ended
        del self._running[done]
        return done.result()[0]

    async def stop(self) -> None:
        """Cancel what runs and wait for its end."""
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)
        self._running.clear()

    @property
    def under_way(self) -> list[str]:
        """The draws of the groups that nobody has taken yet."""
        return list(self._running.values())
