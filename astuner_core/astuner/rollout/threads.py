"""Call other people's code without ever being stuck with it.

A blocking function gets a daemon thread of its own (`astuner.support.threads`).

A coroutine that may block gets an event loop of its own, in such a thread.  Not every one does: the model is asked on
the run's loop, and to cross over for each call took a third more of CPU (0.58 instead of 0.43 ms a call, 64 agents).

Any other coroutine gets a time limit.  All of them share one event loop, and one that blocks it takes everybody's
time; so the clock of each stands still while another one blocks the loop, and runs on while it does so itself.  It
stands still, too, while what it waits for queues for a limit of ours, such as a helper model's `rpm`.  A second for
which both hold is one second.

Invariant: what comes out of `TimeLimits.run` is a value, an `Exception`, or our own cancellation.
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
import threading
import time
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

from astuner.plugins.user_code import is_own, place
from astuner.rollout.queueing import CLOCK, Clock
from astuner.support.threads import in_daemon_thread

T = TypeVar("T")

_WHILE_IT_STANDS = 0.1
"""Seconds between two looks at a clock that stands still."""
GRACE_SECONDS = 5.0
"""How long a coroutine that is given up may tidy up before it is left behind."""

USER_CODE: contextvars.ContextVar[bool] = contextvars.ContextVar("astuner_user_code", default=False)
"""Whether what runs here belongs to a workflow or a judge, the tasks it starts included."""


class OutOfTime(Exception):
    """The code took longer than it may, even if it is done; its cause is what the code raised, if it did."""


class Misbehaved(Exception):
    """What the code did instead of returning or raising an `Exception`; reads on after the code's name."""


async def in_own_loop(function: Callable[..., Coroutine[Any, Any, T]], *args: Any, name: str = "astuner") -> T:
    """Await ``function(*args)`` on an event loop of its own in a daemon thread, where it may block.

    Cancelling the await cancels it there, and goes on waiting for what it makes of that; cancelling once more abandons
    the thread.

    :raises Misbehaved: it called `sys.exit`, cancelled itself, or raised another `BaseException`.
    """
    own = _OwnLoop()
    outcome = asyncio.ensure_future(in_daemon_thread(own.run, function, *args, name=name))
    asked = False
    while True:
        try:
            return await asyncio.shield(outcome)
        except _CancelledThere:
            if asked:
                raise asyncio.CancelledError from None
            raise Misbehaved("cancelled itself") from None
        except asyncio.CancelledError:
            if asked:
                outcome.cancel()
                raise
            asked = True
            own.cancel()


class _CancelledThere(Exception):
    """The coroutine on the other loop ended by being cancelled."""


class _OwnLoop:
    """An event loop for one coroutine, in the thread that calls `run`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancelled = False
        self._task: asyncio.Task[Any] | None = None

    def run(self, function: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        task = loop.create_task(function(*args))
        try:
            with self._lock:
                self._task = task
                if self._cancelled:
                    task.cancel()
            return loop.run_until_complete(task)
        except Exception:
            raise
        except asyncio.CancelledError:
            raise _CancelledThere from None
        except BaseException as e:
            task.exception()  # seen
            raise _misbehaved(e) from e
        finally:
            with self._lock:
                self._task = None
            _end(loop)

    def cancel(self) -> None:
        """Cancel the coroutine, from any thread."""
        with self._lock:
            self._cancelled = True
            if self._task is not None:
                self._task.get_loop().call_soon_threadsafe(self._task.cancel)


def _end(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel what was left running, wait for it a little, and close the loop."""
    try:
        if left := asyncio.all_tasks(loop):
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.wait(left, timeout=GRACE_SECONDS))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def _misbehaved(error: BaseException) -> Misbehaved:
    what = (
        f"called sys.exit({error.code!r})"
        if isinstance(error, SystemExit)
        else f"raised {type(error).__name__}: {error}"
    )
    return Misbehaved(f"{what}{place(error)}")


def stands_at(work: Any) -> str:
    """``file:line in function`` of the user's code that an awaiting coroutine is in, or the thread that it waits for.

    Empty where that is not known.
    """
    own = ""
    while work is not None:
        frame = getattr(work, "cr_frame", None)
        if frame is not None and frame.f_code is in_daemon_thread.__code__:
            frame = sys._current_frames().get(frame.f_locals["thread"].ident)
            while frame is not None and not is_own(frame.f_code.co_filename):
                frame = frame.f_back
        if frame is not None and is_own(frame.f_code.co_filename):
            own = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        work = getattr(work, "cr_await", None)
    return own


class _Timed:
    """The time of one coroutine."""

    def __init__(self) -> None:
        self.clock, self.started = Clock(CLOCK.get()), time.perf_counter()
        self.own = 0.0
        """Seconds for which it blocked the loop."""
        self._others = 0.0
        """Seconds for which another one did, and the clock did not stand still anyway."""

    def used(self) -> float:
        return time.perf_counter() - self.started - self._others - self.clock.stood()

    def other_held(self, began: float, ended: float) -> None:
        """Another one, which has just ended, held the loop since ``began``."""
        began = max(began, self.started)
        self._others += ended - began - self.clock.stood(began)


class TimeLimits:
    """Time limits for coroutines that share an event loop."""

    def __init__(self) -> None:
        self._running: set[_Timed] = set()

    async def run(self, work: Coroutine[Any, Any, T], seconds: float, *, late: Callable[[], None] = lambda: None) -> T:
        """What ``work`` returns, if it takes at most ``seconds``, not counting how long it queues
        (`astuner.rollout.queueing`).

        :param late: called before the coroutine is cancelled, since it takes longer or is no longer wanted.
        :raises OutOfTime: it took longer.
        :raises Misbehaved: it called `sys.exit`, cancelled itself, or raised another `BaseException`.
        """
        slow = asyncio.get_running_loop().slow_callback_duration
        mine = _Timed()
        total: float | None = None

        def used() -> float:
            return mine.used() if total is None else total

        def count(began: float) -> None:
            now = time.perf_counter()
            if now - began >= slow:
                mine.own += now - began
                for other in self._running - {mine}:
                    other.other_held(began, now)

        async def timed() -> T:
            nonlocal total
            USER_CODE.set(True)
            CLOCK.set(mine.clock)
            try:
                return await _steps(work, count)
            except (Exception, asyncio.CancelledError, KeyboardInterrupt, GeneratorExit):
                raise
            except BaseException as e:
                raise _misbehaved(e) from e
            finally:
                total = used()

        task = asyncio.ensure_future(timed())
        self._running.add(mine)
        try:
            while not task.done() and (left := seconds - used()) > 0:
                await asyncio.wait({task}, timeout=max(left, _WHILE_IT_STANDS) if mine.clock.stands else left)
        except asyncio.CancelledError:
            late()
            await _give_up(task)
            raise
        finally:
            self._running.discard(mine)
            if task.done():
                work.close()  # one that is cancelled before it begins is never awaited
        if not task.done() or used() > seconds:
            where = stands_at(work)
            late()
            raised = await _give_up(task)
            if mine.own:
                raise OutOfTime(f"and blocked the event loop for {mine.own:.1f} s") from raised
            raise OutOfTime(f"and was then at {where}" if where else "") from raised
        if task.cancelled():
            raise Misbehaved("cancelled itself")
        return task.result()


@types.coroutine
def _steps(work: Coroutine[Any, Any, T], count: Callable[[float], None]) -> Generator[Any, Any, T]:
    """Await ``work``, telling ``count`` after each of its steps since when that held the event loop."""
    resume: Callable[[Any], Any] = work.send
    value: Any = None
    while True:
        began = time.perf_counter()
        try:
            awaited = resume(value)
        except StopIteration as e:
            result: T = e.value
            return result
        finally:
            count(began)
        try:
            value, resume = (yield awaited), work.send
        except BaseException as e:  # a cancellation, or what it waited for raised: its own to handle
            value, resume = e, work.throw


async def _give_up(task: asyncio.Future[Any]) -> BaseException | None:
    """Cancel and wait a little; what still runs then is left behind.

    :returns: what it raised, if it did.
    """
    task.cancel()
    await asyncio.wait({task}, timeout=GRACE_SECONDS)
    return task.exception() if task.done() and not task.cancelled() else None
