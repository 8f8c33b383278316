"""Many requests at once around one `Decoder`; what happens to them when generation is stopped or weights change.

Every step of the decoder runs in a thread, so the event loop goes on taking requests; between steps, and only then,
requests leave and weights change.  `update` waits until nothing is being generated, so that all tokens of a request are
from one version; `swap` does not, and what was generated before is computed anew with the new weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from astuner_cpu.decoder import Decoder, Request

T = TypeVar("T")


class Serving:
    """A decoder that is fed while requests last."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._answers: dict[Request, asyncio.Future[bool]] = {}
        self._task: asyncio.Task[None] | None = None
        self._paused = False
        self._rejecting = False
        self._update = asyncio.Lock()
        self._gate = asyncio.Condition()
        self._stepping = asyncio.Lock()

    async def generate(self, request: Request) -> bool:
        """Fill ``request``; whether it was finished, rather than stopped by `pause` with what it had so far.

        While paused it waits for `resume`, or is stopped at once where the pause says so.
        """
        async with self._gate:
            while self._paused or self._update.locked():
                if self._rejecting:
                    return False
                await self._gate.wait()
            answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            self._answers[request] = answer
            self._decoder.add(request)
            if self._task is None:
                self._task = asyncio.create_task(self._run())
        return await answer

    async def pause(self, *, reject: bool = False) -> int:
        """Stop every request and let none in until `resume`; how many were stopped.

        :param reject: stop those that arrive as well, instead of letting them wait.
        """
        self._paused, self._rejecting = True, reject
        stopped = len(self._answers)
        async with self._gate:
            self._gate.notify_all()  # those that wait behind an earlier pause, should this one reject
        await self._idle()
        return stopped

    async def resume(self) -> None:
        """Let requests in again."""
        self._paused = self._rejecting = False
        async with self._gate:
            self._gate.notify_all()

    async def update(self, change: Callable[[], None]) -> None:
        """Run ``change`` in a thread once no request is left; those that arrive meanwhile wait."""
        async with self._update:
            await self._idle()
            await asyncio.to_thread(change)
        async with self._gate:
            self._gate.notify_all()

    async def swap(self, change: Callable[[], None]) -> None:
        """Run ``change`` in a thread between two steps; requests go on after it, with the next token.

        :raises Exception: what ``change`` raises; the requests go on as if nothing had happened.
        """

        def swap() -> None:
            change()
            self._decoder.recompute()

        await self.between_steps(swap)

    async def between_steps(self, function: Callable[[], T]) -> T:
        """What ``function`` returns; it runs in a thread while the model computes nothing else."""
        async with self._stepping:
            return await asyncio.to_thread(function)

    async def _idle(self) -> None:
        while self._task is not None:
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        """Step until nobody waits for an answer any more."""
        try:
            while self._answers and not self._paused:
                finished = await self.between_steps(self._decoder.step)
                for request in finished:
                    self._settle(request, finished=True)
                for request in [r for r, answer in self._answers.items() if answer.cancelled()]:
                    self._settle(request, finished=False)
            for request in list(self._answers):
                self._settle(request, finished=False)
        except Exception as error:  # whoever waits is told; the next request starts with an empty batch
            for request, answer in list(self._answers.items()):
                self._decoder.drop(request)
                if not answer.done():
                    answer.set_exception(error)
            self._answers.clear()
        finally:
            self._task = None

    def _settle(self, request: Request, *, finished: bool) -> None:
        answer = self._answers.pop(request)
        self._decoder.drop(request)
        if not answer.done():
            answer.set_result(finished)
