"""Tells a run's subscribers what happens in it (`astuner.contracts.events`).

What is direct or essential is told at once; everybody else has a thread of its own, so that a tracker that hangs holds
up nobody.  A subscriber that raises, takes longer than `LIMIT` for an event, or is so slow that `LONGEST` events wait
for it, is reported once and gets no more of them; an essential one that raises ends the run.  A thread cannot be
killed, so that of a subscriber that hangs is left behind.
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
"""Seconds that an event may take: opening a tracker over a network that is down takes up to 90."""
LONGEST = 1000
"""Events that may wait."""


class Bus:
    """The subscribers of one run; published to by the run's own thread."""

    def __init__(self) -> None:
        self._told: list[Subscriber | InThread] = []
        self._waiting: deque[Event] = deque()
        self._telling = False
        self._remarks: deque[str] = deque()
        """What subscribers have to say, from whatever thread."""
        self._stop: AstunerError | None = None

    def subscribe(self, subscribers: Iterable[Subscriber]) -> None:
        """They are told of everything from now on, after those that are there."""
        for one in subscribers:
            one.remark = self._remarks.append
            self._told.append(one if one.essential or one.direct else InThread(one))

    def publish(self, event: Event) -> None:
        """Tell everybody; what is published meanwhile follows.

        :raises Exception: what an essential subscriber raised.
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
            self._waiting.clear()  # after a failure: whoever raised ends the run

    def stop(self, error: AstunerError) -> None:
        """End the run with this error when it next looks."""
        self._stop = error

    def check_stop(self) -> None:
        """:raises AstunerError: a subscriber wants the run to end."""
        if self._stop is not None:
            raise self._stop

    def go_on(self) -> None:
        """Whatever a subscriber wanted to end is known to the person, who continues the run."""
        self._stop = None

    def numbers(self) -> dict[str, float]:
        """What subscribers measured since the last call."""
        found: dict[str, float] = {}
        for one in self._direct():
            found.update(one.numbers())
        return found

    def state(self) -> dict[str, Any]:
        """What subscribers need to count on in a resumed run."""
        found: dict[str, Any] = {}
        for one in self._direct():
            found.update(one.state())
        return found

    def summaries(self) -> list[Summary]:
        """What subscribers have to say of a run that ended."""
        return [said for one in self._direct() if (said := one.summary()) is not None]

    def close(self) -> None:
        """Tell everybody that nothing follows, and wait for those that come back in time.

        :raises Exception: what an essential subscriber raised; the others are told all the same.
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
            except BaseException as e:  # the others close too; the first of an essential one is raised below
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
            except BaseException as e:  # a stranger's code may raise anything
                let_the_person_stop(e)
                if one.essential:
                    raise
                self._leave_out(one, told(e))

    def _leave_out(self, one: Subscriber | InThread, why: str) -> None:
        """Say that a subscriber failed, if there is a reason, and tell it nothing more."""
        if not why or one not in self._told:
            return
        self._told.remove(one)
        name = type(one.subscriber if isinstance(one, InThread) else one).__name__
        self._remarks.append(f"the log sink {name} failed and is left out from now on: {why}")


class InThread:
    """One subscriber, told things without waiting for it."""

    def __init__(self, subscriber: Subscriber, *, limit: float = LIMIT, longest: int = LONGEST) -> None:
        self.subscriber = subscriber
        self._limit, self._longest = limit, longest
        self._events: deque[Event] = deque()
        self._since: float | None = None
        """When the event that is being handled came."""
        self._failure = ""
        self._changed = threading.Condition()
        threading.Thread(target=self._work, name=f"astuner-sink-{type(subscriber).__name__}", daemon=True).start()

    def tell(self, event: Event) -> None:
        """Have it told, if it wants to know."""
        if not self.subscriber.wants(event) and not isinstance(event, RunClosed):  # which ends the thread, too
            return
        with self._changed:
            if self._failure:
                return
            if isinstance(event, Progressed) and self._events:
                return  # there will be newer progress
            if len(self._events) >= self._longest:
                self._fail(f"it is too slow: {len(self._events)} calls wait for it")
                return
            self._events.append(event)
            self._changed.notify_all()

    def failure(self) -> str:
        """Why it is to be left out; "" while it goes."""
        with self._changed:
            if not self._failure and self._since is not None and time.monotonic() - self._since > self._limit:
                self._fail(f"it did not come back within {self._limit:g} s")
            return self._failure

    def drain(self) -> None:
        """Wait until everything was told, as long as it comes back in time."""
        while not self.failure():
            with self._changed:
                if self._since is None and not self._events:
                    return
                self._changed.wait(self._left())

    def _left(self) -> float:
        """Seconds until the event that is being handled takes too long."""
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
