"""Work that blocks, in a few daemon threads, for any event loop and any thread; asked for by many at once, done once.

Daemon threads, since a request may hang for as long as its timeout and must not keep the interpreter from ending.
Invariant: at most as many run at once as there are threads, in every process its own; whoever waits gets the job's
outcome on its own loop; when the last one gave up, the job is told so, and one that did not begin never does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from astuner import Clock

T = TypeVar("T")
_Job = tuple["Future[Any]", Callable[[], Any]]


class Workers:
    """At most ``most`` daemon threads, started as they are needed."""

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._fresh()

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Have ``function`` called; cancelling the future keeps it from being called, if it was not yet."""
        future: Future[T] = Future()
        if self._process != os.getpid():  # a fork: the threads are its parent's
            self._fresh()
        with self._lock:
            self._jobs.put((future, function))
            self._waiting += 1
            if self._waiting > self._idle and self._threads < self._most:
                self._threads += 1
                threading.Thread(target=self._work, args=(self._jobs,), name=self._name, daemon=True).start()
        return future

    def _fresh(self) -> None:
        self._process, self._lock = os.getpid(), threading.Lock()
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._threads = self._idle = self._waiting = 0

    def _work(self, jobs: queue.SimpleQueue[_Job]) -> None:
        while True:
            with self._lock:
                self._idle += 1
            future, function = jobs.get()
            with self._lock:
                self._idle -= 1
                self._waiting -= 1
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = function()
            except BaseException as e:  # whoever waits is told, whatever it is
                future.set_exception(e)
            else:
                future.set_result(result)
            del future, function


class Waiters:
    """Those who wait for one job, which queues at first: their clocks, and whether anybody is left."""

    def __init__(self) -> None:
        self._lock, self._left = threading.Lock(), threading.Event()
        self._clocks: list[Clock] = []
        self._queued = True

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """The clock that holds here is told of the job, until the block ends."""
        clock = Clock.here()
        if clock is None:
            yield
            return
        with self._lock:
            self._clocks.append(clock)
            _tell([clock], self._queued, 1)
        try:
            yield
        finally:
            with self._lock:
                self._clocks.remove(clock)
                _tell([clock], self._queued, -1)

    def begins(self) -> None:
        """It does not queue any more."""
        self._set(False)

    @contextlib.contextmanager
    def queueing(self) -> Iterator[None]:
        """It queues again, until the block ends."""
        self._set(True)
        try:
            yield
        finally:
            self._set(False)

    def leave(self) -> None:
        """Nobody waits any more."""
        self._left.set()

    def left_within(self, seconds: float) -> bool:
        """Sleep, at most until nobody waits any more; whether that is so."""
        return self._left.wait(max(seconds, 0.0))

    def _set(self, queued: bool) -> None:
        with self._lock:
            if queued != self._queued:
                _tell(self._clocks, self._queued, -1)
                _tell(self._clocks, queued, 1)
                self._queued = queued


def _tell(clocks: list[Clock], queued: bool, more: int) -> None:
    for clock in clocks:
        clock.change(queued=more if queued else 0, under_way=0 if queued else more)


@dataclass
class _Flight(Generic[T]):
    job: Future[T]
    waiters: Waiters
    waiting: int = 0


@dataclass
class Flights(Generic[T]):
    """Jobs under way, by what they are about."""

    _lock: threading.RLock = field(default_factory=threading.RLock)
    _open: dict[Hashable, _Flight[T]] = field(default_factory=dict)

    async def join(self, about: Hashable, begin: Callable[[Waiters], Future[T]]) -> tuple[T, bool]:
        """The outcome of the job about this, and whether it was begun for this call.

        :param begin: starts it; it tells the waiters when it queues, and is told by them when nobody waits any more.
        """
        with self._lock:
            flight = self._open.get(about)
            mine = flight is None
            if flight is None:
                waiters = Waiters()
                flight = self._open[about] = _Flight(begin(waiters), waiters)
            flight.waiting += 1
        if mine:
            flight.job.add_done_callback(lambda _: self._close(about, flight))
        try:
            with flight.waiters.joined():
                return await waited(flight.job), mine
        except asyncio.CancelledError:
            with self._lock:
                flight.waiting -= 1
                if last := not flight.waiting:
                    self._close(about, flight)
            if last:
                flight.waiters.leave()
                flight.job.cancel()
            raise

    def _close(self, about: Hashable, flight: _Flight[T]) -> None:
        with self._lock:
            if self._open.get(about) is flight:
                del self._open[about]


async def waited(job: Future[T]) -> T:
    """The outcome of ``job``; cancelling the await leaves the job alone."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def deliver() -> None:
        if outcome.done():
            return
        if job.cancelled():
            outcome.cancel()
        elif (error := job.exception()) is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(job.result())

    def tell(_: Future[T]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits there any more
            loop.call_soon_threadsafe(deliver)

    job.add_done_callback(tell)
    return await outcome
