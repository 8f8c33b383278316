"""Mailbox between Trinity's actors and the run's own process.

Trinity's explorer, runners and trainer are Ray actors, and an actor cannot call the process that started it.  They put
requests (to `astuner_trinity.session.Session`) into a mailbox actor, and the run answers them in order.  Requests are
opaque bytes, so the mailbox imports nothing of an experiment.

Invariant: every request is answered, with a reply or with the reason why the run ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

import ray
from ray import cloudpickle

from astuner.contracts.errors import AstunerError, RunError
from astuner_trinity.session import Request, Session

P = ParamSpec("P")
R = TypeVar("R")
NAME = "astuner-mailbox"
_PATIENCE = 1.0
"""Seconds that a poll for requests waits if there are none."""


class _Mailbox:
    """Actor that stores requests and replies."""

    def __init__(self) -> None:
        self._requests: asyncio.Queue[tuple[int, bytes]] = asyncio.Queue()
        self._asked: dict[int, asyncio.Future[bytes]] = {}
        self._numbers = itertools.count()

    async def ask(self, request: bytes) -> bytes:
        number = next(self._numbers)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        self._requests.put_nowait((number, request))
        try:
            return await answer
        finally:
            del self._asked[number]

    async def tell(self, news: bytes) -> None:
        self._requests.put_nowait((-1, news))

    async def new(self) -> list[tuple[int, bytes]]:
        try:
            first = await asyncio.wait_for(self._requests.get(), _PATIENCE)
        except asyncio.TimeoutError:
            return []
        return [first, *(self._requests.get_nowait() for _ in range(self._requests.qsize()))]

    async def answer(self, number: int, reply: bytes) -> None:
        if (asked := self._asked.get(number)) is not None and not asked.done():
            asked.set_result(reply)


class Mailbox:
    """The run's side of the mailbox; it closes with the connection to Ray."""

    def __init__(self, actor: Any = None) -> None:
        """:param actor: Existing mailbox actor; by default a new one is created."""
        self._actor = actor or ray.remote(_Mailbox).options(name=NAME, num_cpus=0, max_concurrency=100_000).remote()
        self._look: asyncio.Future[list[tuple[int, bytes]]] | None = None
        """Poll in progress; if `answer_requests` is cancelled, its next call handles the result."""

    async def answer_requests(self, answers: Callable[[Request], Any]) -> None:
        """Answer requests in their order until cancelled.

        :param answers: Returns the reply to a request, or an awaitable of it.
        :raises Exception: Raised by ``answers``: the run is over, and the caller of the request is informed.
        """
        answering: set[asyncio.Future[Any]] = set()
        try:
            while True:
                self._look = self._look or asyncio.ensure_future(self._actor.new.remote())
                done, _ = await asyncio.wait({self._look, *answering}, return_when=asyncio.FIRST_COMPLETED)
                for task in done & answering:
                    answering.remove(task)
                    task.result()
                if self._look in done:
                    found, self._look = self._look.result(), None
                    answering |= {asyncio.ensure_future(self._answer(answers, *asked)) for asked in found}
                    # let each start, so that requests that need no waiting are answered before a cancellation
                    await asyncio.sleep(0)
        finally:
            for task in answering:
                task.cancel()

    async def _answer(self, answers: Callable[[Request], Any], number: int, request: bytes) -> None:
        try:
            reply = answers(cloudpickle.loads(request))
            if asyncio.iscoroutine(reply):
                reply = await reply
        except Exception as e:
            if number >= 0:
                await self._actor.answer.remote(number, cloudpickle.dumps((None, f"{type(e).__name__}: {e}")))
            raise
        if number >= 0:
            await self._actor.answer.remote(number, cloudpickle.dumps((reply, "")))


@overload
async def ask(method: Callable[Concatenate[Any, P], Awaitable[R]], *arguments: P.args, **named: P.kwargs) -> R: ...
@overload
async def ask(method: Callable[Concatenate[Any, P], R], *arguments: P.args, **named: P.kwargs) -> R: ...
async def ask(method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Send a request to the run and return the reply; called in an actor.

    :param method: Method of `Session`.
    :raises RunError: The run is over; the message has the reason.
    """
    answer: tuple[Any, str] = cloudpickle.loads(await _mailbox().ask.remote(_request(method, arguments)))
    reply, error = answer
    if error:
        raise RunError(f"the run has ended: {error}")
    return reply


def tell(method: Callable[Concatenate[Any, P], Any], *arguments: P.args, **named: P.kwargs) -> None:
    """Send a message without a reply to the run; called in an actor, never waits."""
    _mailbox().tell.remote(_request(method, arguments))


def hand_in(method: Callable[Concatenate[Any, P], None], *arguments: P.args, **named: P.kwargs) -> None:
    """Send a message and wait until it is in the mailbox, so that it precedes all later requests."""
    ray.get(_mailbox().tell.remote(_request(method, arguments)))


def _request(method: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    text: bytes = cloudpickle.dumps(Request(method.__name__, arguments))
    return text


@contextlib.asynccontextmanager
async def reported(doing: str) -> AsyncIterator[None]:
    """Report an exception in the block to the run, because Trinity only writes it to a log file."""
    try:
        yield
    except Exception as e:
        what = str(e) if isinstance(e, AstunerError) else f"{type(e).__name__}: {e}"
        tell(Session.failed, f"{doing} failed: {what}")
        raise


@functools.lru_cache(maxsize=1)
def _mailbox() -> Any:
    return ray.get_actor(NAME)
