"""Run user code without being blocked by it.

A blocking function runs in its own daemon thread (`astuner.support.threads`).

A coroutine that may block runs on its own event loop in such a thread. Other coroutines do not: the model is called on
the run's loop, and crossing threads for each call costs a third more CPU time (0.58 instead of 0.43 ms per call with 64
agents).

Other coroutines share one event loop and have a time limit. A coroutine that blocks the loop takes time from all, so
the
clock of a coroutine stops while another one blocks the loop, and runs while it blocks the loop itself. A clock also
stops while the coroutine queues for a limit of ASTuner, such as a helper model's `rpm`. A second for which both apply
counts once.

Invariant: `TimeLimits.run` returns a value, or raises an `Exception` or the run's own cancellation.

A judge that waits for a helper model's `rpm` is not slow. Failing it would repeat the same calls and lengthen the
queue.
Time limits therefore provide a `Clock` in the context variable `CLOCK`, and queues notify the clocks of all waiting
code. Invariant: a clock stops exactly while a request made under it is queued and none is in progress. Other work
during
that time is not counted either, because it is unknown whether it waits for the answer.

`watching` finds code that blocks the event loop and interrupts it. ``time.sleep`` in an ``async def execute`` stops all
episodes and all timeouts. A heartbeat runs on the loop and a thread monitors it. If the heartbeat stops, the thread
reports the line that blocks the loop. If it stops for too long, a signal handler raises `LoopBlocked` in that line.
Only
the step that the thread observed is interrupted, and only if it is code of a workflow or a judge.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import itertools
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn, TypeAlias, TypeVar

from astuner.contracts.errors import EpisodeError, shown, told
from astuner.contracts.interrupt import handled, let_the_person_stop
from astuner.plugins.user_code import is_own, raised_at
from astuner.support.threads import in_daemon_thread


class Clock:
    """Measures how long code runs, excluding time in queues. Thread-safe.

    :param outer: Clock of an enclosing time limit, which stops together with this one.
    """

    def __init__(self, outer: Clock | None = None) -> None:
        self._outer, self._lock = outer, threading.Lock()
        self._queued = self._under_way = 0
        self._started, self._since = time.perf_counter(), 0.0
        self._periods: list[tuple[float, float]] = []
        """Periods (start, end) during which the clock was stopped; they do not overlap."""

    @staticmethod
    def here() -> Clock | None:
        """Return the clock of the time limit around the caller, or None."""
        return CLOCK.get()

    @property
    def stands(self) -> bool:
        """Whether the clock is stopped because a request is queued."""
        return self._queued > 0 and not self._under_way

    def stood(self) -> float:
        """Return the seconds for which the clock was stopped."""
        with self._lock:
            now = time.perf_counter()
            until = self._since if self.stands else now
            return now - until + sum(min(end, until) - begin for begin, end in self._periods if begin < until)

    def ran(self) -> float:
        """Return the seconds since the start, without those for which the clock was stopped."""
        return time.perf_counter() - self._started - self.stood()

    def change(self, *, queued: int = 0, under_way: int = 0) -> None:
        """Change the numbers of queued requests and of requests in progress."""
        with self._lock:
            now, stood = time.perf_counter(), self.stands
            self._queued += queued
            self._under_way += under_way
            if stood and not self.stands:
                self._add(self._since, now)
            elif self.stands and not stood:
                self._since = now
        if self._outer is not None:
            self._outer.change(queued=queued, under_way=under_way)

    def other_held(self, began: float, ended: float) -> None:
        """Exclude a period, ending now, in which other code blocked the event loop."""
        with self._lock:
            self._add(max(began, self._started), ended)

    def _add(self, began: float, ended: float) -> None:
        while self._periods and self._periods[-1][1] >= began:
            begin, end = self._periods.pop()
            began, ended = min(begin, began), max(end, ended)
        self._periods.append((began, ended))


CLOCK: contextvars.ContextVar[Clock | None] = contextvars.ContextVar("astuner_clock", default=None)
"""Clock of the current time limit, inherited by tasks and threads; None without a limit."""


T = TypeVar("T")

_WHILE_IT_STANDS = 0.1
"""Seconds between checks of a stopped clock."""
GRACE_SECONDS = 5.0
"""Seconds that a cancelled coroutine may use for cleanup before it is abandoned."""

USER_CODE: contextvars.ContextVar[bool] = contextvars.ContextVar("astuner_user_code", default=False)
"""Whether the current code belongs to a workflow or a judge, including the tasks it starts."""


class OutOfTime(Exception):
    """The code exceeded its time limit, even if it has finished. Its cause is the code's exception, if there is one."""


class Exited(BaseException):
    """User code called `os._exit`, which would have ended the run without a message."""


def _guard_exit(leave: Callable[[int], NoReturn] = os._exit) -> None:
    """Let `os._exit` raise `Exited` if user code calls it in this process. Forked processes may exit."""
    here = os.getpid()

    def guarded(status: int) -> NoReturn:
        if os.getpid() == here and (USER_CODE.get() or is_own(sys._getframe(1).f_code.co_filename)):
            raise Exited(f"os._exit({status}) would end the run")
        leave(status)

    os._exit = guarded


class Misbehaved(Exception):
    """Code neither returned nor raised an `Exception`. The message continues a sentence after the code's name."""


async def in_own_loop(function: Callable[..., Coroutine[Any, Any, T]], *args: Any, name: str = "astuner") -> T:
    """Await ``function(*args)`` on a new event loop in a daemon thread, where it may block.

    Cancelling the await cancels the function and waits for its end. A second cancellation abandons the thread.

    :raises Misbehaved: It called `sys.exit`, cancelled itself, or raised another `BaseException`.
    """
    loop, tasks = asyncio.new_event_loop(), []

    def run() -> T:
        asyncio.set_event_loop(loop)
        try:
            with contained():
                tasks.append(task := loop.create_task(function(*args)))
                task.add_done_callback(lambda task: task.cancelled() or task.exception())  # mark as retrieved
                return loop.run_until_complete(task)
        finally:
            asyncio.set_event_loop(None)
            end_loop(loop, GRACE_SECONDS)

    outcome = asyncio.ensure_future(in_daemon_thread(run, name=name))
    asked = False
    while True:
        try:
            return await asyncio.shield(outcome)
        except Misbehaved:
            if asked:
                raise asyncio.CancelledError from None
            raise
        except asyncio.CancelledError:
            if asked:
                outcome.cancel()
                raise
            asked = True
            with contextlib.suppress(RuntimeError):  # it has just ended and closed its loop
                loop.call_soon_threadsafe(lambda: [task.cancel() for task in tasks])


def end_loop(loop: asyncio.AbstractEventLoop, seconds: float | None) -> None:
    """Cancel remaining tasks, wait for them (without limit if ``seconds`` is None), and close the loop."""
    try:
        if left := asyncio.all_tasks(loop):
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.wait(left, timeout=seconds))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


@contextmanager
def contained(*through: type[BaseException]) -> Iterator[None]:
    """Convert exceptions of user code that are not an `Exception` to `Misbehaved`, except for the user's Ctrl-C.

    :param through: Further exceptions to pass on, for example the run's own cancellation.
    """
    try:
        yield
    except BaseException as e:
        if isinstance(e, (Exception, *through)):
            raise
        let_the_person_stop(e)
        if isinstance(e, asyncio.CancelledError):
            raise Misbehaved("cancelled itself") from e
        said = f"called sys.exit({shown(e.code)})" if isinstance(e, SystemExit) else f"raised {told(e)}"
        raise Misbehaved(said + raised_at(e)) from e


def stands_at(work: Any) -> str:
    """Return ``file:line in function`` of the user code that an awaiting coroutine, or its thread, is in.

    Return an empty string if it is unknown.
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


class TimeLimits:
    """Time limits of coroutines that share an event loop."""

    def __init__(self) -> None:
        self._running: set[Clock] = set()
        _guard_exit()

    async def run(self, work: Coroutine[Any, Any, T], seconds: float, *, late: Callable[[], None] = lambda: None) -> T:
        """Return the result of ``work`` if it takes at most ``seconds``, excluding time in queues.

        :param late: Called before the coroutine is cancelled because of the limit or from outside.
        :raises OutOfTime: It exceeded the limit.
        :raises Misbehaved: It called `sys.exit`, cancelled itself, or raised another `BaseException`.
        """
        slow = asyncio.get_running_loop().slow_callback_duration
        clock, blocked = Clock(CLOCK.get()), 0.0
        total: float | None = None

        def used() -> float:
            return clock.ran() if total is None else total

        def count(began: float) -> None:
            nonlocal blocked
            now = time.perf_counter()
            if now - began >= slow:
                blocked += now - began
                for other in self._running - {clock}:
                    other.other_held(began, now)

        async def timed() -> T:
            nonlocal total
            USER_CODE.set(True)
            CLOCK.set(clock)
            try:
                with contained(asyncio.CancelledError, GeneratorExit):
                    return await _steps(work, count)
            finally:
                total = used()

        task = asyncio.ensure_future(timed())
        self._running.add(clock)
        try:
            while not task.done() and (left := seconds - used()) > 0:
                await asyncio.wait({task}, timeout=max(left, _WHILE_IT_STANDS) if clock.stands else left)
        except asyncio.CancelledError:
            late()
            await _give_up(task)
            raise
        finally:
            self._running.discard(clock)
            if task.done():
                work.close()  # a coroutine cancelled before its start is never awaited
        if not task.done() or used() > seconds:
            where = stands_at(work)
            late()
            raised = await _give_up(task)
            if blocked:
                raise OutOfTime(f"and blocked the event loop for {blocked:.1f} s") from raised
            raise OutOfTime(f"and was then at {where}" if where else "") from raised
        return contained()(task.result)()


@types.coroutine
def _steps(work: Coroutine[Any, Any, T], count: Callable[[float], None]) -> Generator[Any, Any, T]:
    """Await ``work``, and call ``count`` after each step with the time at which the step started."""
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
        except BaseException as e:  # a cancellation or an error of an awaited object, to be handled by the coroutine
            value, resume = e, work.throw


async def _give_up(task: asyncio.Future[Any]) -> BaseException | None:
    """Cancel a task and wait briefly for its end; after that it is abandoned.

    :returns: The exception that it raised, if any.
    """
    task.cancel()
    await asyncio.wait({task}, timeout=GRACE_SECONDS)
    if not task.done():  # never freed: at exit Python would try to end it again, which may take forever
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(task))
    return task.exception() if task.done() and not task.cancelled() else None


PATIENCE = 5.0
"""Seconds without a heartbeat before the user is notified."""

_DEBUGGERS = {"bdb", "pdb", "pydevd", "_pydevd_bundle"}
_told: set[str] = set()  # each place is reported once per process, not once per step


class LoopBlocked(EpisodeError):
    """A workflow or judge blocked the event loop for too long; raised in the blocking line."""


@contextmanager
def watching(loop: asyncio.AbstractEventLoop, limit_seconds: float, tell: Callable[[str], None]) -> Iterator[None]:
    """Watch ``loop``, which this thread runs in the block.

    :param limit_seconds: Seconds that one step may block the loop before it is interrupted. Interruption requires the
        main thread and SIGALRM; without them, blocking is only reported.
    :param tell: Receives a message for the user; called from another thread.
    """
    interrupts = threading.current_thread() is threading.main_thread() and hasattr(signal, "SIGALRM")
    thread, over, patience = threading.get_ident(), threading.Event(), min(PATIENCE, limit_seconds)
    period = patience / 4
    beats, times, story = 0, 0, ""
    timer: asyncio.TimerHandle
    guilty: _Step | None = None
    handler_before: Any = None

    def beat() -> None:
        nonlocal beats, timer
        beats += 1
        timer = loop.call_later(period, beat)

    def current() -> _Step:
        return beats, asyncio.current_task(loop)

    def listen() -> None:
        """Check in every period, in a separate thread, whether the loop is still in the same step."""
        nonlocal guilty, story, times
        seen, held, looked = current(), 0.0, time.monotonic()
        while not over.wait(period):
            before, looked = looked, time.monotonic()
            step = current()
            frame = sys._current_frames().get(thread)
            if step != seen or step[1] is None or frame is None or _debugged(frame):
                seen, held, times = step, 0.0, 0
                continue
            held += min(looked - before, 2 * period)  # longer only if the process was suspended
            if held < patience:
                continue
            where, is_users = _place(frame)
            if is_users:
                story = f"{where} blocks the event loop. Make `execute` (or `judge`) a plain `def`, or use await"
            else:
                story = (
                    f"ASTuner is blocked in {where}: the disk is slow, or another process has locked a file of the "
                    "run folder"
                )
            if where not in _told and not _imports(frame):  # imports block once, and usually in ASTuner
                _told.add(where)
                with contextlib.suppress(OSError):  # the disk is full, which the run's next write will report
                    tell(f"{story}; all other episodes wait until it continues")
            if held >= limit_seconds and interrupts:
                guilty, times = step, times + 1
                held = limit_seconds - patience  # repeat if it still blocks
                signal.pthread_kill(thread, signal.SIGALRM)

    def handle(number: int, frame: FrameType | None) -> None:
        """Handle the signal in the main thread, between two instructions of the current code."""
        nonlocal guilty
        held, guilty = guilty, None
        if held is None:  # an alarm of other code
            if callable(handler_before):
                handler_before(number, frame)
        elif held == current() and USER_CODE.get() and not over.is_set():
            if times > 1:  # the first one was swallowed, for example by `except Exception` around a retry
                raise asyncio.CancelledError(story)
            raise LoopBlocked(story)

    listener = threading.Thread(target=listen, name="astuner watchdog", daemon=True)
    handler_before = signal.getsignal(signal.SIGALRM) if interrupts else None
    with handled([signal.SIGALRM] if interrupts else [], handle):
        timer = loop.call_later(period, beat)
        listener.start()
        try:
            yield
        finally:
            over.set()
            timer.cancel()
            listener.join()  # a pending signal is handled, and ignored, before the handler changes


_STEP_OF_LOOP = asyncio.Handle._run.__code__
_Step: TypeAlias = tuple[int, object]
"""The step that holds the loop: equal pairs are the same step of the same task."""


def _debugged(frame: FrameType) -> bool:
    """Return whether a user is at a breakpoint."""
    return any(str(f.f_globals.get("__name__")).partition(".")[0] in _DEBUGGERS for f in _outward(frame))


def _imports(frame: FrameType) -> bool:
    return any(f.f_code.co_filename.startswith("<frozen importlib") for f in _outward(frame))


def _place(frame: FrameType) -> tuple[str, bool]:
    """Return ``file:line in function`` of the code that blocks the loop, and whether it is user code.

    This is the innermost frame of user code in the loop's current step, or the innermost frame of all.
    """
    inside = itertools.takewhile(lambda f: f.f_code is not _STEP_OF_LOOP, _outward(frame))
    users = next((f for f in inside if is_own(f.f_code.co_filename)), None)
    where = users or frame
    return f"{where.f_code.co_filename}:{where.f_lineno} in {where.f_code.co_name}", users is not None


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
