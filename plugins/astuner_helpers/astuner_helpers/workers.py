"""Run blocking work in a few daemon threads for any event loop and thread, once for identical concurrent calls.

Threads are daemons because a request may hang until its timeout, which must not delay the exit of the interpreter.
Invariant: at most one job runs per thread, and every process has its own threads. Each caller receives the outcome on
its own event loop. When the last caller gives up, the job is notified; a job that has not started never starts.
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
    """At most ``most`` daemon threads, started on demand."""

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._fresh()

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Submit ``function``. Cancelling the future prevents the call if it has not started."""
        future: Future[T] = Future()
        if self._process != os.getpid():  # after a fork: the threads belong to the parent
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
            except BaseException as e:  # the caller receives every exception
                future.set_exception(e)
            else:
                future.set_result(result)
            del future, function


class Waiters:
    """Callers that wait for one job: their clocks, and whether any caller is left. A job starts as queued."""

    def __init__(self) -> None:
        self._lock, self._left = threading.Lock(), threading.Event()
        self._clocks: list[Clock] = []
        self._queued = True

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """Report the job to the current clock while the block runs."""
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
        """Mark the job as running."""
        self._set(False)

    @contextlib.contextmanager
    def queueing(self) -> Iterator[None]:
        """Mark the job as queued while the block runs."""
        self._set(True)
        try:
            yield
        finally:
            self._set(False)

    def leave(self) -> None:
        """Record that no caller waits any more."""
        self._left.set()

    def left_within(self, seconds: float) -> bool:
        """Sleep until the time is over or no caller waits any more, and return whether no caller waits."""
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
    """Jobs in progress, by key."""

    _lock: threading.RLock = field(default_factory=threading.RLock)
    _open: dict[Hashable, _Flight[T]] = field(default_factory=dict)

    async def join(self, about: Hashable, begin: Callable[[Waiters], Future[T]]) -> tuple[T, bool]:
        """Return the outcome of the job with this key, and whether it was started for this call.

        :param begin: Start the job. The job reports its state to the waiters and checks whether any are left.
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
    """Return the outcome of ``job``. Cancelling the await does not cancel the job."""
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
        with contextlib.suppress(RuntimeError):  # the loop is closed: no caller waits there any more
            loop.call_soon_threadsafe(deliver)

    job.add_done_callback(tell)
    return await outcome
