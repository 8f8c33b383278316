"""Work that blocks, in a few daemon threads, for any event loop and any thread.

Daemon threads, since a request may hang for as long as its timeout and must not keep the interpreter from ending.
Invariant: at most as many run at once as there are threads, in every process its own; a job that nobody waits for any
more and that did not begin never does.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

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
