"""One instance: an episode's world, its process, and what is known about it.

One thing at a time happens in it.  Invariant: once `gone` is set nothing more is asked of its process, and whoever
waits for an answer is told how it ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from astuner_env.manager.ends import absence
from astuner_env.manager.process import Process
from astuner_env.manager.refusal import Loss
from astuner_env.manager.replays import Replays, look_at
from astuner_env.manager.served import ServedEnvironment

T = TypeVar("T")


class Instance:
    """What the manager keeps about an instance; it alone writes to it."""

    def __init__(
        self, instance_id: str, environment: ServedEnvironment, task_id: str, folder: Path, now: float
    ) -> None:
        self.id = instance_id
        self.environment = environment
        self.task_id = task_id
        self.folder = folder
        """Its scratch folder; `output` lies beside it."""
        self.created = self.used = now
        self.process: Process | None = None
        self.beginning: asyncio.Future[Any] | None = None
        self.watch: asyncio.Future[None] | None = None
        self.clearing: asyncio.Task[None] | None = None
        self.has_slot = False
        self.steps = 0
        self.is_over = False
        self.replays = Replays()
        self.lock = asyncio.Lock()
        self.loss: Loss | None = None
        self.gone = asyncio.Event()

    @property
    def output(self) -> Path:
        """The file with what its process prints."""
        return self.folder.with_name(self.folder.name + ".log")

    @property
    def is_busy(self) -> bool:
        """Whether something is under way in it, its creation included."""
        return self.lock.locked()

    async def unless_gone(self, work: Coroutine[Any, Any, T]) -> T:
        """What ``work`` returns, unless the instance ends first.

        :raises Refusal: it ended; how.
        """
        task = asyncio.ensure_future(work)
        task.add_done_callback(look_at)
        gone = asyncio.ensure_future(self.gone.wait())
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
            raise
        finally:
            gone.cancel()
        if task.done() and not task.cancelled() and (self.loss is None or task.exception() is not None):
            return task.result()
        task.cancel()
        raise absence(self.id, self.loss)
