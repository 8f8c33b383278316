"""Call other people's code without ever being stuck with it.

A blocking function gets a daemon thread of its own (`astuner.support.threads`).

A coroutine that may block gets an event loop of its own, in such a thread.  Not every one does: the model is asked on
the run's loop, and to cross over for each call took a third more of CPU (0.58 instead of 0.43 ms a call, 64 agents).

Any other coroutine gets a time limit.  All of them share one event loop, and one that blocks it takes everybody's
time; so the clock of each stands still while another one blocks the loop, and runs on while it does so itself.  It
stands still, too, while what it waits for queues for a limit of ours, such as a helper model's `rpm`.  A second for
which both hold is one second.

Invariant: what comes out of `TimeLimits.run` is a value, an `Exception`, or our own cancellation.

A judge with 60 seconds that waits for a helper model's `rpm` is not slow; failing it would ask the same again and make
the queue longer.  So whoever limits somebody's time gives them a `Clock` (by the context variable `CLOCK`), and
whoever lets things queue tells the clocks of all that wait.  Invariant: a clock stands still exactly while something
that was asked under it queues and nothing that was asked under it is under way.  So own work beside a question that
queues is not counted either: nobody can tell whether it waits for the answer.

`watching` tells who blocks the loop, and ends it.  A coroutine that does not await keeps the loop to itself:
``time.sleep`` in an ``async def execute`` stops every episode and every timeout.  So a heart beats on the loop, and a
thread listens.  When the beats stop it says which line holds the loop; when they stop for too long it sends a signal
whose handler raises `LoopBlocked` in that line.  Only the step that the thread saw is interrupted, and only if it is a
workflow's or a judge's.
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
    """How long something runs, and how long its clock stood still; may be asked and told from any thread.

    :param outer: the clock of a time limit around this one, which stands still with it.
    """

    def __init__(self, outer: Clock | None = None) -> None:
        self._outer, self._lock = outer, threading.Lock()
        self._queued = self._under_way = 0
        self._started, self._since = time.perf_counter(), 0.0
        self._periods: list[tuple[float, float]] = []
        """From when to when it stood still; they do not overlap."""

    @staticmethod
    def here() -> Clock | None:
        """That of the time limit that holds for whoever calls this; None: there is none."""
        return CLOCK.get()

    @property
    def stands(self) -> bool:
        """Whether it stands still now, since something queues."""
        return self._queued > 0 and not self._under_way

    def stood(self) -> float:
        """Seconds for which it stood still so far."""
        with self._lock:
            now = time.perf_counter()
            until = self._since if self.stands else now
            return now - until + sum(min(end, until) - begin for begin, end in self._periods if begin < until)

    def ran(self) -> float:
        """Seconds since it was made, but those for which it stood still."""
        return time.perf_counter() - self._started - self.stood()

    def change(self, *, queued: int = 0, under_way: int = 0) -> None:
        """So many more (or fewer) things queue and are under way."""
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
        """Another one, which has just ended, held the event loop since ``began``."""
        with self._lock:
            self._add(max(began, self._started), ended)

    def _add(self, began: float, ended: float) -> None:
        while self._periods and self._periods[-1][1] >= began:
            begin, end = self._periods.pop()
            began, ended = min(begin, began), max(end, ended)
        self._periods.append((began, ended))


CLOCK: contextvars.ContextVar[Clock | None] = contextvars.ContextVar("astuner_clock", default=None)
"""Of the time limit that holds for what runs here, the tasks and threads it starts included; None: there is none."""


T = TypeVar("T")

_WHILE_IT_STANDS = 0.1
"""Seconds between two looks at a clock that stands still."""
GRACE_SECONDS = 5.0
"""How long a coroutine that is given up may tidy up before it is left behind."""

USER_CODE: contextvars.ContextVar[bool] = contextvars.ContextVar("astuner_user_code", default=False)
"""Whether what runs here belongs to a workflow or a judge, the tasks it starts included."""


class OutOfTime(Exception):
    """The code took longer than it may, even if it is done; its cause is what the code raised, if it did."""


class Exited(BaseException):
    """User code called `os._exit`, which would have ended the run and everybody's episodes without a word."""


def _guard_exit(leave: Callable[[int], NoReturn] = os._exit) -> None:
    """Have `os._exit` raise `Exited` where user code calls it in this process; a fork of it may leave."""
    here = os.getpid()

    def guarded(status: int) -> NoReturn:
        if os.getpid() == here and (USER_CODE.get() or is_own(sys._getframe(1).f_code.co_filename)):
            raise Exited(f"os._exit({status}) would end the run")
        leave(status)

    os._exit = guarded


class Misbehaved(Exception):
    """What the code did instead of returning or raising an `Exception`; reads on after the code's name."""


async def in_own_loop(function: Callable[..., Coroutine[Any, Any, T]], *args: Any, name: str = "astuner") -> T:
    """Await ``function(*args)`` on an event loop of its own in a daemon thread, where it may block.

    Cancelling the await cancels it there, and goes on waiting for what it makes of that; cancelling once more abandons
    the thread.

    :raises Misbehaved: it called `sys.exit`, cancelled itself, or raised another `BaseException`.
    """
    loop, tasks = asyncio.new_event_loop(), []

    def run() -> T:
        asyncio.set_event_loop(loop)
        try:
            with contained():
                tasks.append(task := loop.create_task(function(*args)))
                task.add_done_callback(lambda task: task.cancelled() or task.exception())  # seen
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
            with contextlib.suppress(RuntimeError):  # it has ended just now, and its loop is closed
                loop.call_soon_threadsafe(lambda: [task.cancel() for task in tasks])


def end_loop(loop: asyncio.AbstractEventLoop, seconds: float | None) -> None:
    """Cancel what was left running, wait for it a little (None: until it has ended), and close the loop."""
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
    """The boundary around user code: what is no `Exception` becomes `Misbehaved`, the person's own Ctrl-C apart.

    :param through: what passes besides, where it may be ours: a cancellation, the end of a coroutine.
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


class TimeLimits:
    """Time limits for coroutines that share an event loop."""

    def __init__(self) -> None:
        self._running: set[Clock] = set()
        _guard_exit()

    async def run(self, work: Coroutine[Any, Any, T], seconds: float, *, late: Callable[[], None] = lambda: None) -> T:
        """What ``work`` returns, if it takes at most ``seconds``, not counting how long it queues.

        :param late: called before the coroutine is cancelled, since it takes longer or is no longer wanted.
        :raises OutOfTime: it took longer.
        :raises Misbehaved: it called `sys.exit`, cancelled itself, or raised another `BaseException`.
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
                work.close()  # one that is cancelled before it begins is never awaited
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
    if not task.done():  # kept for good: Python's exit would ask it to end once more, which may take for ever
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(task))
    return task.exception() if task.done() and not task.cancelled() else None


PATIENCE = 5.0
"""Seconds without a heartbeat before the person is told."""

_DEBUGGERS = {"bdb", "pdb", "pydevd", "_pydevd_bundle"}
_told: set[str] = set()  # each place is named once per process, not once per step


class LoopBlocked(EpisodeError):
    """A workflow or judge kept the event loop to itself for too long; raised in the line that does."""


@contextmanager
def watching(loop: asyncio.AbstractEventLoop, limit_seconds: float, tell: Callable[[str], None]) -> Iterator[None]:
    """Watch ``loop``, which this thread runs in the block.

    :param limit_seconds: for how long one step may hold the loop before it is interrupted. That works in the main
        thread, on systems with SIGALRM; elsewhere the person is told, and nothing more.
    :param tell: gets a sentence for the person; called from a thread beside the loop.
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
        """Look every period, in a thread of its own, whether the loop is still in the same step."""
        nonlocal guilty, story, times
        seen, held, looked = current(), 0.0, time.monotonic()
        while not over.wait(period):
            before, looked = looked, time.monotonic()
            step = current()
            frame = sys._current_frames().get(thread)
            if step != seen or step[1] is None or frame is None or _debugged(frame):
                seen, held, times = step, 0.0, 0
                continue
            held += min(looked - before, 2 * period)  # more has passed only if the whole process was stopped
            if held < patience:
                continue
            where, is_users = _place(frame)
            if is_users:
                story = f"{where} blocks the event loop: make `execute` (or `judge`) a plain `def`, or use await"
            else:
                story = (
                    f"ASTuner itself waits in {where}: the disk is slow, or another process has locked a file of the "
                    "run folder"
                )
            if where not in _told and not _imports(frame):  # which is once, and mostly our doing
                _told.add(where)
                with contextlib.suppress(OSError):  # the disk is full, as what the run itself writes next will say
                    tell(f"{story}; until it goes on, every other episode stands still")
            if held >= limit_seconds and interrupts:
                guilty, times = step, times + 1
                held = limit_seconds - patience  # again, should it go on
                signal.pthread_kill(thread, signal.SIGALRM)

    def handle(number: int, frame: FrameType | None) -> None:
        """In the main thread, between two instructions of whatever runs there."""
        nonlocal guilty
        held, guilty = guilty, None
        if held is None:  # somebody else's alarm
            if callable(handler_before):
                handler_before(number, frame)
        elif held == current() and USER_CODE.get() and not over.is_set():
            if times > 1:  # swallowed, by an `except Exception` around a retry for example
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
            listener.join()  # a signal it has sent is handled, and ignored, before the handler changes


_STEP_OF_LOOP = asyncio.Handle._run.__code__
_Step: TypeAlias = tuple[int, object]
"""What holds the loop: the same pair is the same step of the same task."""


def _debugged(frame: FrameType) -> bool:
    """Whether a person sits at a breakpoint."""
    return any(str(f.f_globals.get("__name__")).partition(".")[0] in _DEBUGGERS for f in _outward(frame))


def _imports(frame: FrameType) -> bool:
    return any(f.f_code.co_filename.startswith("<frozen importlib") for f in _outward(frame))


def _place(frame: FrameType) -> tuple[str, bool]:
    """Return ``file:line in function`` of what blocks the loop, and whether that is user code.

    It is the innermost frame of user code in the loop's present step, or else the innermost frame of all.
    """
    inside = itertools.takewhile(lambda f: f.f_code is not _STEP_OF_LOOP, _outward(frame))
    users = next((f for f in inside if is_own(f.f_code.co_filename)), None)
    where = users or frame
    return f"{where.f_code.co_filename}:{where.f_lineno} in {where.f_code.co_name}", users is not None


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
