"""Deliver the events of a run to its subscribers (`astuner.contracts.events`).

Direct and essential subscribers handle events immediately. Every other subscriber has its own thread, so a tracker
that hangs does not block the run. A subscriber is reported once and removed if it raises, takes longer than `LIMIT`
for an event, or has `LONGEST` events waiting. If an essential subscriber raises, the run ends. Threads cannot be
killed, so the thread of a hanging subscriber remains.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from astuner.contracts.errors import AstunerError, told
from astuner.contracts.events import Event, Note, Progressed, RunClosed, Subscriber, Summary
from astuner.contracts.interrupt import let_the_person_stop

LIMIT = 120.0
"""Seconds allowed per event. Opening a tracker over a failed network takes up to 90."""
LONGEST = 1000
"""Maximum number of events waiting for one subscriber."""


class Bus:
    """The subscribers of one run. Only the run's own thread publishes."""

    def __init__(self) -> None:
        self._told: list[Subscriber | InThread] = []
        self._waiting: deque[Event] = deque()
        self._telling = False
        self._remarks: deque[str] = deque()
        """Remarks of subscribers, from any thread."""
        self._stop: AstunerError | None = None

    def subscribe(self, subscribers: Iterable[Subscriber]) -> None:
        """Add subscribers after the existing ones. They receive all events from now on."""
        for one in subscribers:
            one.remark = self._remarks.append
            self._told.append(one if one.essential or one.direct else InThread(one))

    def publish(self, event: Event) -> None:
        """Deliver an event to all subscribers. Events published during delivery follow it.

        :raises Exception: The error of an essential subscriber.
        """
        self._waiting.append(event)
        if self._telling:
            return
        self._telling = True
        try:
            while self._waiting or self._remarks:
                self._tell(Note(text=self._remarks.popleft()) if self._remarks else self._waiting.popleft())
        finally:
            self._telling = False
            self._waiting.clear()  # after a failure of an essential subscriber the run ends

    def stop(self, error: AstunerError) -> None:
        """End the run with this error at the next check."""
        self._stop = error

    def check_stop(self) -> None:
        """Raise the error of a subscriber that requested to stop the run.

        :raises AstunerError: A subscriber requested it with `stop`.
        """
        if self._stop is not None:
            raise self._stop

    def go_on(self) -> None:
        """Discard a request to stop: the user has seen it and resumed the run."""
        self._stop = None

    def numbers(self) -> dict[str, float]:
        """Return the values that subscribers measured since the last call."""
        found: dict[str, float] = {}
        for one in self._direct():
            found.update(one.numbers())
        return found

    def state(self) -> dict[str, Any]:
        """Return the state that subscribers need in a resumed run."""
        found: dict[str, Any] = {}
        for one in self._direct():
            found.update(one.state())
        return found

    def summaries(self) -> list[Summary]:
        """Return the subscribers' summaries of a finished run."""
        return [said for one in self._direct() if (said := one.summary()) is not None]

    def close(self) -> None:
        """Notify all subscribers that no events follow, and wait for threads within their time limit.

        :raises Exception: The first error of an essential subscriber; all others are closed first.
        """
        raised: list[BaseException] = []
        for one in list(self._told):
            if isinstance(one, InThread):
                one.tell(RunClosed())
                one.drain()
                self._leave_out(one, one.failure())
        self._told = [one for one in self._told if not isinstance(one, InThread)]
        self._pass_on_remarks()
        for one in self._direct():
            try:
                if one.wants(RunClosed()):
                    one.handle(RunClosed())
            except BaseException as e:  # close the others too; the first essential error is raised below
                let_the_person_stop(e)
                if one.essential:
                    raised.append(e)
                else:
                    self._leave_out(one, told(e))
        self._pass_on_remarks()
        if raised:
            raise raised[0]

    def _pass_on_remarks(self) -> None:
        while self._remarks:
            self._tell(Note(text=self._remarks.popleft()))

    def _direct(self) -> Sequence[Subscriber]:
        return [one for one in self._told if isinstance(one, Subscriber)]

    def _tell(self, event: Event) -> None:
        for one in list(self._told):
            if isinstance(one, InThread):
                self._leave_out(one, one.failure())
                one.tell(event)
                continue
            try:
                if one.wants(event):
                    one.handle(event)
            except BaseException as e:  # third-party code may raise anything
                let_the_person_stop(e)
                if one.essential:
                    raise
                self._leave_out(one, told(e))

    def _leave_out(self, one: Subscriber | InThread, why: str) -> None:
        """Report a subscriber that failed, if ``why`` is not empty, and remove it."""
        if not why or one not in self._told:
            return
        self._told.remove(one)
        name = type(one.subscriber if isinstance(one, InThread) else one).__name__
        self._remarks.append(f"log sink {name} failed and is disabled for the rest of the run: {why}")


class InThread:
    """A subscriber that handles events in its own thread."""

    def __init__(self, subscriber: Subscriber, *, limit: float = LIMIT, longest: int = LONGEST) -> None:
        self.subscriber = subscriber
        self._limit, self._longest = limit, longest
        self._events: deque[Event] = deque()
        self._since: float | None = None
        """Start time of the event in progress."""
        self._failure = ""
        self._changed = threading.Condition()
        threading.Thread(target=self._work, name=f"astuner-sink-{type(subscriber).__name__}", daemon=True).start()

    def tell(self, event: Event) -> None:
        """Queue an event that the subscriber handles."""
        if not self.subscriber.wants(event) and not isinstance(event, RunClosed):  # RunClosed also ends the thread
            return
        with self._changed:
            if self._failure:
                return
            if isinstance(event, Progressed) and self._events:
                return  # newer progress will follow
            if len(self._events) >= self._longest:
                self._fail(f"too slow, {len(self._events)} events are waiting")
                return
            self._events.append(event)
            self._changed.notify_all()

    def failure(self) -> str:
        """Return why the subscriber must be removed, or an empty string."""
        with self._changed:
            if not self._failure and self._since is not None and time.monotonic() - self._since > self._limit:
                self._fail(f"no response within {self._limit:g} s")
            return self._failure

    def drain(self) -> None:
        """Wait until all queued events are handled, or the subscriber fails."""
        while not self.failure():
            with self._changed:
                if self._since is None and not self._events:
                    return
                self._changed.wait(self._left())

    def _left(self) -> float:
        """Return the seconds until the event in progress exceeds the limit."""
        return self._limit if self._since is None else max(self._since + self._limit - time.monotonic(), 0.01)

    def _fail(self, why: str) -> None:
        self._failure = why
        self._events.clear()
        self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._since = None
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._events or self._failure)
                if self._failure:
                    return
                event = self._events.popleft()
                self._since = time.monotonic()
            try:
                if self.subscriber.wants(event):
                    self.subscriber.handle(event)
            except BaseException as e:
                with self._changed:
                    self._fail(told(e))
                return
            if isinstance(event, RunClosed):
                with self._changed:
                    self._since = None
                    self._changed.notify_all()
                return
