"""An exporter of spans, and what became of what it was given.

The thread of the SDK hands it batch after batch.  Invariant: an outage of the collector is said once, and once more
that it is over; when the end has come no batch is tried over and over, and the first that fails is the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from opentelemetry.sdk.trace.export import SpanExportResult

from astuner.telemetry.collector import Collector
from astuner.telemetry.exporter_words import diverted, why

LAST_CHANCE = 2.0
"""Seconds that a batch may take once the end has come."""

Remark = Callable[[str], None]


class WatchedExporter:
    """
    :param make: makes the exporter, with a timeout in seconds for each batch; None is the exporter's own.
    :param remark: is told of outages, and in the end of what was lost.
    """

    def __init__(self, make: Callable[[float | None], Any], collector: Collector, remark: Remark) -> None:
        self._make, self._inner = make, make(None)
        self._collector, self._remark = collector, remark
        self.made = self.sent = 0
        self._why = ""
        """Why it takes nothing; empty while it takes what it is sent."""
        self._ending = self._given_up = False

    def export(self, spans: Sequence[Any]) -> SpanExportResult:
        if self._given_up:
            return SpanExportResult.FAILURE
        inner = self._inner
        went, lines = _try(inner, spans)
        if not went and inner is not self._inner:  # the end came while it was being tried again and again
            went, lines = _try(self._inner, spans)
        if went:
            self._went(len(spans))
            return SpanExportResult.SUCCESS
        self._failed(why(lines, self._collector))
        return SpanExportResult.FAILURE

    def end(self) -> None:
        """What waits still has a chance, but a short one: somebody is waiting for the process to end."""
        trying, self._inner = self._inner, self._make(LAST_CHANCE)
        self._ending = True
        with diverted():
            trying.shutdown()  # it waits no longer between its tries

    def give_up(self) -> None:
        """Try no more: it takes too long."""
        self._given_up = True
        self._why = self._why or why([], self._collector)

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return True

    def sum_up(self) -> None:
        """Say what was lost, if anything was."""
        if lost := self.made - self.sent:
            why_not = self._why or "it took none for a while, or fewer than came"
            self._remark(
                f"{lost:,} of {self.made:,} spans did not reach the collector at {self._collector.shown}: {why_not}"
            )

    def _went(self, count: int) -> None:
        self.sent += count
        if self._why:
            self._why = ""
            self._remark(f"the collector at {self._collector.shown} takes spans again; the end says what was lost")

    def _failed(self, why_not: str) -> None:
        is_new, self._why = not self._why, why_not
        if self._ending:
            self._given_up = True  # `sum_up` says it
        elif is_new:
            self._remark(
                f"the collector at {self._collector.shown} takes no spans: {why_not}. Nothing waits for it; it is said "
                "when it takes them again"
            )


def _try(exporter: Any, spans: Sequence[Any]) -> tuple[bool, list[str]]:
    with diverted() as lines:
        return went(exporter.export, spans, SpanExportResult.SUCCESS, lines), lines


def went(export: Callable[[Any], Any], what: Any, success: Any, lines: list[str]) -> bool:
    """Whether an exporter took ``what``; older ones raise where nobody takes the connection."""
    try:
        return bool(export(what) is success)
    except Exception as e:  # whatever it is: the SDK's thread would only log it, for every batch
        lines.append(f"{type(e).__name__}: {e}")
        return False
