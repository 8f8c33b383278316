"""An exporter of spans, and what became of what it was given.

The thread of the SDK hands it batch after batch.  Invariant: an outage of the collector is said once, and once more
that it is over; when the end has come no batch is tried over and over, and the first that fails is the last.  What it
may have got, since it was sent and no answer came, is never said to have been lost for certain.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from opentelemetry.sdk.trace.export import SpanExportResult

from astuner_trackers.telemetry.collector import Collector
from astuner_trackers.telemetry.exporter_words import diverted, timed_out, why

LAST_CHANCE = 2.0
"""Seconds that a batch may take once the end has come, where the collector is known to take nothing."""

Remark = Callable[[str], None]


class WatchedExporter:
    """
    :param make: makes the exporter, with a timeout in seconds for each batch.
    :param remark: is told of outages, and in the end of what was lost.
    :param timeout: seconds for each batch.
    """

    def __init__(self, make: Callable[[float], Any], collector: Collector, remark: Remark, *, timeout: float) -> None:
        self._make, self._inner = make, make(timeout)
        self._timeout = self._usual = timeout
        self._collector, self._remark = collector, remark
        self.made = self.sent = 0
        self._why = ""
        """Why it takes nothing; empty while it takes what it is sent."""
        self._unanswered = 0
        """Of those that were not taken, spans that it may have got all the same."""
        self._last_why = ""
        self._out: tuple[int, list[str]] = (0, [])
        """Spans that are being tried now, and what was said of that so far."""
        self._ending = self._given_up = False

    def export(self, spans: Sequence[Any]) -> SpanExportResult:
        if self._given_up:
            return SpanExportResult.FAILURE
        inner = self._inner
        went, lines, late = self._try(spans)
        if not went and not late and inner is not self._inner:  # the end came between its tries
            went, lines, late = self._try(spans)
        if went:
            self._went(len(spans))
        else:
            self._unanswered += len(spans) if late else 0
            self._failed(why(lines, self._collector))
        self._out = (0, [])  # after `sent`: whoever waits sees one of the two
        return SpanExportResult.SUCCESS if went else SpanExportResult.FAILURE

    def end(self) -> None:
        """What waits still has a chance, but a short one if it took nothing lately: somebody waits for the end."""
        self._timeout = LAST_CHANCE if self._why else max(self._usual, LAST_CHANCE)
        trying, self._inner = self._inner, self._make(self._timeout)
        self._ending = True
        with diverted():
            trying.shutdown()  # it waits no longer between its tries

    @property
    def may_answer(self) -> bool:
        """Whether a request is out that nobody has refused, to a collector that is not known to be down."""
        count, lines = self._out
        return bool(count) and not lines and not self._why

    def give_up(self) -> None:
        """Try no more: it takes too long."""
        self._given_up = True
        self._why = self._why or why(self._out[1], self._collector)

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return True

    def sum_up(self) -> None:
        """Say what was lost, if anything was."""
        if lost := self.made - self.sent:
            why_not = self._why or (f"for a while, {self._last_why}" if self._last_why else "it took fewer than came")
            count, lines = self._out
            unanswered = min(self._unanswered + (0 if lines else count), lost)
            late = f" ({unanswered:,} of them may have: its answer was late)" if unanswered else ""
            self._remark(
                f"{lost:,} of {self.made:,} spans did not reach the collector at {self._collector.shown}{late}: "
                f"{why_not}"
            )

    def _try(self, spans: Sequence[Any]) -> tuple[bool, list[str], bool]:
        """Whether they were taken; else what was said, and whether that is because no answer came in time."""
        inner, timeout, began = self._inner, self._timeout, time.perf_counter()
        with diverted() as lines:
            self._out = (len(spans), lines)
            taken = went(inner.export, spans, SpanExportResult.SUCCESS, lines)
        return taken, lines, timed_out(lines, time.perf_counter() - began, timeout)

    def _went(self, count: int) -> None:
        self.sent += count
        if self._why:
            self._why = ""
            self._remark(f"the collector at {self._collector.shown} takes spans again; the end says what was lost")

    def _failed(self, why_not: str) -> None:
        is_new, self._why = not self._why, why_not
        self._last_why = why_not
        if self._ending:
            self._given_up = True  # `sum_up` says it
        elif is_new:
            self._remark(
                f"the collector at {self._collector.shown} takes no spans: {why_not}. Nothing waits for it; it is said "
                "when it takes them again"
            )


def went(export: Callable[[Any], Any], what: Any, success: Any, lines: list[str]) -> bool:
    """Whether an exporter took ``what``; older ones raise where nobody takes the connection."""
    try:
        return bool(export(what) is success)
    except Exception as e:  # whatever it is: the SDK's thread would only log it, for every batch
        lines.append(f"{type(e).__name__}: {e}")
        return False
