"""Export spans and metrics to a collector with OpenTelemetry's SDK and its OTLP exporters.

No provider is created, so the tracing setup of an agent framework is unchanged. Spans wait in a bounded queue that an
SDK thread empties.

Invariant: an outage of the collector is reported once, and so is its end. After `close` no batch is retried, and the
first failing batch is the last. Spans that were sent without a response are never reported as certainly lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import export as points
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from astuner_trackers.telemetry.collector import Collector, diverted, timed_out, timeout, why
from astuner_trackers.telemetry.spans import Attribute, Span

QUEUE, BATCH = 8192, 256
"""Maximum number of queued spans, and spans per batch."""
LINGER = 2.0
"""Seconds that a span waits for a batch to fill."""
FAREWELL = 3.0
"""Seconds that closing waits for a collector that rejects batches or is known to be down."""
PATIENCE = 3
"""Consecutive rejections of metrics after which no more are sent."""
SCHEMA = "https://opentelemetry.io/schemas/1.41.0"
LAST_CHANCE = 2.0
"""Time limit of a batch in seconds during closing, if the collector is known to be down."""

Remark = Callable[[str], None]


def resource(attributes: Mapping[str, Attribute]) -> Resource:
    """Return the sender's resource: ``attributes``, ``OTEL_SERVICE_NAME`` and ``OTEL_RESOURCE_ATTRIBUTES``."""
    found = Resource.create(dict(attributes))
    if str(found.attributes.get("service.name", "")).startswith("unknown_service"):
        found = found.merge(Resource({"service.name": "astuner"}))
    return found


class SpanSender:
    """Sender of spans, for use by one thread. Only `close` waits for the collector."""

    def __init__(self, collector: Collector, who: Resource, version: str, remark: Remark) -> None:
        def exporter(seconds: float) -> OTLPSpanExporter:
            return OTLPSpanExporter(collector.url, headers=dict(collector.headers), timeout=seconds)

        self._exporter = WatchedExporter(exporter, collector, remark, timeout=timeout("traces"))
        self._who = who
        self._scope = InstrumentationScope("astuner", version, SCHEMA)
        self._waiting = BatchSpanProcessor(
            self._exporter,  # type: ignore[arg-type]
            max_queue_size=QUEUE,
            schedule_delay_millis=LINGER * 1000,
            max_export_batch_size=BATCH,
        )

    def send(self, spans: Sequence[Span]) -> None:
        with diverted():  # captures the SDK's message about a full queue; `close` counts the losses
            for span in spans:
                self._exporter.made += 1
                self._waiting.on_end(self._readable(span))

    def _readable(self, span: Span) -> ReadableSpan:
        status = trace.Status(trace.StatusCode.ERROR, span.error) if span.error else trace.Status()
        return ReadableSpan(
            _plain(span.name),
            _context(span.trace_id, span.span_id),
            None if span.parent_id is None else _context(span.trace_id, span.parent_id),
            self._who,
            _clean(span.attributes),
            [Event(name, _clean(attributes), _nanoseconds(when)) for name, when, attributes in span.events],
            [trace.Link(_context(*link)) for link in span.links],
            trace.SpanKind[span.kind.upper()],
            status=status,
            start_time=_nanoseconds(span.start),
            end_time=_nanoseconds(span.end),
            instrumentation_scope=self._scope,
        )

    @property
    def made_and_sent(self) -> tuple[int, int]:
        """Numbers of created spans and of spans that the collector accepted."""
        return self._exporter.made, self._exporter.sent

    def close(self) -> None:
        """Send queued spans for up to half a minute, and report losses.

        Waits longer than `FAREWELL` only for a collector that accepts data, or that may still respond.
        """
        self._exporter.end()
        ending = threading.Thread(target=self._shut_down, name="astuner-last-spans", daemon=True)
        ending.start()
        taken = -1
        while ending.is_alive() and (taken != self._exporter.sent or self._exporter.may_answer):
            taken = self._exporter.sent
            ending.join(FAREWELL)
        if ending.is_alive():
            self._exporter.give_up()
        self._exporter.sum_up()

    def _shut_down(self) -> None:
        """Wait until the queue is empty, sending was given up, or the SDK's half a minute has passed."""
        with diverted():
            self._waiting.shutdown()  # type: ignore[no-untyped-call]


class MetricSender:
    """Sender of step metrics as gauges. Waits for the collector for up to ``OTEL_EXPORTER_OTLP_TIMEOUT``."""

    def __init__(self, collector: Collector, who: Resource, version: str, remark: Remark) -> None:
        self._collector, self._who, self._remark = collector, who, remark
        self._exporter = OTLPMetricExporter(collector.url, headers=dict(collector.headers))
        self._scope = InstrumentationScope("astuner", version, SCHEMA)
        self._failures = 0

    def send(self, values: Mapping[str, float], attributes: Mapping[str, Attribute]) -> None:
        """Send the current values.

        :param values: Name -> value.
        """
        if self._failures >= PATIENCE or not values:
            return
        now = time.time_ns()

        def gauge(name: str, value: float) -> points.Metric:
            point = points.NumberDataPoint(dict(attributes), start_time_unix_nano=now, time_unix_nano=now, value=value)
            return points.Metric(name, None, None, points.Gauge([point]))

        found = points.ScopeMetrics(self._scope, [gauge(*item) for item in values.items()], SCHEMA)
        data = points.MetricsData([points.ResourceMetrics(self._who, [found], SCHEMA)])
        with diverted() as lines:
            taken = went(self._exporter.export, data, points.MetricExportResult.SUCCESS, lines)
        if taken:
            self._failures = 0
            return
        self._failures += 1
        if self._failures == PATIENCE:
            self._remark(
                f"The collector at {self._collector.shown} does not accept metrics: {why(lines, self._collector)}. No "
                "more metrics are sent."
            )

    def close(self) -> None:
        self._exporter.shutdown()


def _context(trace_id: int, span_id: int) -> trace.SpanContext:
    return trace.SpanContext(trace_id, span_id, is_remote=False, trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED))


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def _clean(attributes: Mapping[str, Attribute]) -> dict[str, Any]:
    return {_plain(key): _plain(value) if isinstance(value, str) else value for key, value in attributes.items()}


def _plain(text: str) -> str:
    """Replace lone surrogates, which would make the collector reject the batch."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


class WatchedExporter:
    """Exporter that tracks outages and losses.

    :param make: Creates the exporter with a timeout in seconds per batch.
    :param remark: Called with messages about outages, and at the end about losses.
    :param timeout: Seconds per batch.
    """

    def __init__(self, make: Callable[[float], Any], collector: Collector, remark: Remark, *, timeout: float) -> None:
        self._make, self._inner = make, make(timeout)
        self._timeout = self._usual = timeout
        self._collector, self._remark = collector, remark
        self.made = self.sent = 0
        self._why = ""
        """Cause of the current outage; empty without one."""
        self._unanswered = 0
        """Spans that were not confirmed but may have been received."""
        self._last_why = ""
        self._out: tuple[int, list[str]] = (0, [])
        """Number of spans being sent, and log messages about them so far."""
        self._ending = self._given_up = False

    def export(self, spans: Sequence[Any]) -> SpanExportResult:
        if self._given_up:
            return SpanExportResult.FAILURE
        inner = self._inner
        went, lines, late = self._try(spans)
        if not went and not late and inner is not self._inner:  # `end` was called between retries
            went, lines, late = self._try(spans)
        if went:
            self.sent += len(spans)
            if self._why:
                self._why = ""
                self._remark(
                    f"The collector at {self._collector.shown} accepts spans again; losses are reported at the end"
                )
        else:
            self._unanswered += len(spans) if late else 0
            self._failed(why(lines, self._collector))
        self._out = (0, [])  # after `sent`, so that a waiting thread sees at least one of them
        return SpanExportResult.SUCCESS if went else SpanExportResult.FAILURE

    def end(self) -> None:
        """Limit further attempts, and shorten them if the last ones failed, because the user waits for the end."""
        self._timeout = LAST_CHANCE if self._why else max(self._usual, LAST_CHANCE)
        trying, self._inner = self._inner, self._make(self._timeout)
        self._ending = True
        with diverted():
            trying.shutdown()  # ends the wait between retries

    @property
    def may_answer(self) -> bool:
        """Return whether a request is pending to a collector that is not known to be down."""
        count, lines = self._out
        return bool(count) and not lines and not self._why

    def give_up(self) -> None:
        """Stop sending after the time limit."""
        self._given_up = True
        self._why = self._why or why(self._out[1], self._collector)

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return True

    def sum_up(self) -> None:
        """Report losses, if there are any."""
        if lost := self.made - self.sent:
            why_not = self._why or (f"for a while, {self._last_why}" if self._last_why else "it was too slow")
            count, lines = self._out
            unanswered = min(self._unanswered + (0 if lines else count), lost)
            late = f" ({unanswered:,} of them may have arrived: the response was late)" if unanswered else ""
            self._remark(
                f"{lost:,} of {self.made:,} spans did not reach the collector at {self._collector.shown}{late}: "
                f"{why_not}"
            )

    def _try(self, spans: Sequence[Any]) -> tuple[bool, list[str], bool]:
        """Return whether the spans were accepted, log messages otherwise, and whether the response was missing."""
        inner, timeout, began = self._inner, self._timeout, time.perf_counter()
        with diverted() as lines:
            self._out = (len(spans), lines)
            taken = went(inner.export, spans, SpanExportResult.SUCCESS, lines)
        return taken, lines, timed_out(lines, time.perf_counter() - began, timeout)

    def _failed(self, why_not: str) -> None:
        is_new, self._why = not self._why, why_not
        self._last_why = why_not
        if self._ending:
            self._given_up = True  # `sum_up` reports it
        elif is_new:
            self._remark(
                f"The collector at {self._collector.shown} does not accept spans: {why_not}. The run does not wait for "
                "it; a message follows when it accepts spans again."
            )


def went(export: Callable[[Any], Any], what: Any, success: Any, lines: list[str]) -> bool:
    """Return whether an exporter delivered ``what``. Older exporters raise if a connection is refused."""
    try:
        return bool(export(what) is success)
    except Exception as e:  # the SDK's thread would log any exception for every batch
        lines.append(f"{type(e).__name__}: {e}")
        return False
