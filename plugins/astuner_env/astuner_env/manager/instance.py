"""One instance: an episode's world, its process, and what is known about it.

One thing at a time happens in it.  Invariant: once `gone` is set nothing more is asked of its process, and whoever
waits for an answer is told how it ended.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from astuner_env.manager.process import Process
from astuner_env.manager.refusal import Loss, Refusal, absence
from astuner_env.manager.served import ServedEnvironment

T = TypeVar("T")
_KEPT = 4
"""How many answers are kept; a client has one action under way, so it can miss the last answer only."""
_REMEMBERED = 1000
"""How many ids without an answer are known; clients send again only what is under way."""


class Replays:
    """The actions of one instance that carried an id: a request that is sent again gets the first one's answer.

    A client whose answer was lost on the way cannot know whether its action was carried out, so it gives every action
    an id and may send it again, also while the first one is still under way.  Invariant: for one id of the last
    thousand, the work is begun once.
    """

    def __init__(self) -> None:
        self._answers: OrderedDict[str, tuple[Any, asyncio.Task[Any]]] = OrderedDict()
        self._older: OrderedDict[str, None] = OrderedDict()

    async def once(self, request_id: str, action: Any, work: Callable[[], Awaitable[Any]]) -> tuple[Any, bool]:
        """The answer of ``work``, and whether it was begun earlier; raises what it raised.

        :raises Refusal: bad_request; the id belonged to another action, or to one too long ago.
        """
        if request_id in self._older:
            raise Refusal(
                "bad_request",
                f"the request {request_id!r} was carried out already, and its answer is no longer kept; "
                "give every action a request_id of its own",
            )
        found = self._answers.get(request_id)
        if found is not None and _written(found[0]) != _written(action):
            raise Refusal(
                "bad_request",
                f"the request_id {request_id!r} was used for another action; give every action one of its own",
            )
        if found is None:
            found = action, asyncio.ensure_future(_as_coroutine(work))
            found[1].add_done_callback(look_at)
            self._answers[request_id] = found
            self._forget()
            return await asyncio.shield(found[1]), False
        return await asyncio.shield(found[1]), True

    def _forget(self) -> None:
        for request_id in [r for r, (_, task) in self._answers.items() if task.done()][:-_KEPT]:
            del self._answers[request_id]
            self._older[request_id] = None
        while len(self._older) > _REMEMBERED:
            self._older.popitem(last=False)


def _written(action: Any) -> str:
    return json.dumps(action, sort_keys=True)  # 1, 1.0 and true are equal in Python, and are three actions


async def _as_coroutine(work: Callable[[], Awaitable[Any]]) -> Any:
    return await work()


def look_at(task: asyncio.Future[Any]) -> None:
    """A done callback: if nobody waits for the error any more, asyncio need not complain."""
    if not task.cancelled():
        task.exception()


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
