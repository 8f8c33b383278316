"""What happens in a run, as server-sent events, for as long as somebody listens.

A listener's files are looked at twice a second; nothing is done when nobody listens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from astuner_view.answers import json_text
from astuner_view.book import Book
from astuner_view.json_tail import Tail
from astuner_view.log_thread import LogReader, count

Ask = Callable[[Callable[[LogReader], dict[str, Any]]], Awaitable[dict[str, Any]]]
EVERY = 0.5
"""Seconds between two looks."""
QUIET = 15.0
"""Seconds after which the state is said again, so that a listener knows that somebody is there."""


async def events(book: Book, ask: Ask, cursor: str, is_stopping: Callable[[], bool]) -> AsyncIterator[str]:
    """Events until the run has ended, or the server stops.

    :param ask: asks the run's log.
    :param cursor: where the listener's metrics end; "" for all of them.
    """
    yield "retry: 2000\n\n"
    alarms = (await asyncio.to_thread(book.alarms)).cursor
    said: dict[str, Any] = {}
    said_at = 0.0
    first = True
    while not is_stopping():
        status = await ask(lambda reader: book.status(count(reader)))  # first: no row is missed at the end
        metrics = await asyncio.to_thread(book.metrics, cursor)
        if metrics.rows or (metrics.reset and (first or cursor)):
            yield _event("metrics", _metrics(metrics), metrics.cursor)
        cursor, first = metrics.cursor, False
        new = await asyncio.to_thread(book.alarms, alarms)
        for alarm in new.rows if not new.reset or not alarms else ():  # of a file that was rewound none is new
            yield _event("alarm", alarm)
        alarms = new.cursor
        if status != said or time.monotonic() - said_at >= QUIET:
            yield _event("status", status)
            said, said_at = status, time.monotonic()
        if status["state"] == "ended":
            yield _event("end", {})
            return
        await asyncio.sleep(EVERY)


def _metrics(tail: Tail) -> dict[str, Any]:
    return {"rows": tail.rows, "cursor": tail.cursor, "reset": tail.reset}


def _event(name: str, data: Any, identity: str = "") -> str:
    head = f"id: {identity}\n" if identity else ""
    return f"{head}event: {name}\ndata: {json_text(data)}\n\n"
