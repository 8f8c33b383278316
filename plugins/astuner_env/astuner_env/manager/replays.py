"""At most once: a request that is sent again gets the first one's answer.

A client whose answer was lost on the way cannot know whether its action was carried out, so it gives every action an
id and may send it again, also while the first one is still under way.  Invariant: for one id of
the last thousand, the work is begun once.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

from astuner_env.manager.refusal import Refusal

_KEPT = 4
"""How many answers are kept; a client has one action under way, so it can miss the last answer only."""
_REMEMBERED = 1000
"""How many ids without an answer are known; clients send again only what is under way."""


class Replays:
    """The actions of one instance that carried an id."""

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
