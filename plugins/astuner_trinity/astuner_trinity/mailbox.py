"""Where Trinity's actors and the run's own process meet.

Trinity's explorer, its runners and its trainer are Ray actors, and an actor cannot call the process that started it.
So they leave requests (of `astuner_trinity.session.Session`) in a mailbox, an actor between them, and the run answers
one after another.  What is asked travels as opaque bytes: the mailbox imports nothing of an experiment.

Invariant: every request is answered, with a reply or with why the run ends.
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
"""Seconds that a look for questions takes when there is none."""


class _Mailbox:
    """The actor."""

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
    """The mailbox as the run's own process has it; it closes with the connection to Ray."""

    def __init__(self, actor: Any = None) -> None:
        """:param actor: another one than a new one of this run's."""
        self._actor = actor or ray.remote(_Mailbox).options(name=NAME, num_cpus=0, max_concurrency=100_000).remote()
        self._look: asyncio.Future[list[tuple[int, bytes]]] | None = None
        """A look that is under way; what it finds is answered by the next `answer_requests` if this one is over."""

    async def answer_requests(self, answers: Callable[[Request], Any]) -> None:
        """Answer what is asked, in the order of asking, until this is cancelled.

        :param answers: request -> the reply, or an awaitable of it.
        :raises Exception: what ``answers`` raised: the run is over, and whoever asked is told so.
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
                    # each begins, and what needs no waiting is answered, before this can be cancelled
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
    """Ask the run; called in an actor.

    :param method: of `Session`.
    :raises RunError: the run is over, and why.
    """
    answer: tuple[Any, str] = cloudpickle.loads(await _mailbox().ask.remote(_request(method, arguments)))
    reply, error = answer
    if error:
        raise RunError(f"the run has ended: {error}")
    return reply


def tell(method: Callable[Concatenate[Any, P], Any], *arguments: P.args, **named: P.kwargs) -> None:
    """Tell the run something that needs no answer; called in an actor, and never waits."""
    _mailbox().tell.remote(_request(method, arguments))


def hand_in(method: Callable[Concatenate[Any, P], None], *arguments: P.args, **named: P.kwargs) -> None:
    """The same, and wait until it lies in the mailbox, before whatever is asked or told from now on."""
    ray.get(_mailbox().tell.remote(_request(method, arguments)))


def _request(method: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    text: bytes = cloudpickle.dumps(Request(method.__name__, arguments))
    return text


@contextlib.asynccontextmanager
async def reported(doing: str) -> AsyncIterator[None]:
    """Tell the run of what is raised in the block, where Trinity only writes it into a log file."""
    try:
        yield
    except Exception as e:
        what = str(e) if isinstance(e, AstunerError) else f"{type(e).__name__}: {e}"
        tell(Session.failed, f"{doing} failed: {what}")
        raise


@functools.lru_cache(maxsize=1)
def _mailbox() -> Any:
    return ray.get_actor(NAME)
