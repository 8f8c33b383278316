"""Spans and numbers to a collector, through OpenTelemetry's SDK and its OTLP exporters.

The provider is our own and never the process's (`opentelemetry.trace.set_tracer_provider` is not called), so what an
agent framework sets up for itself stays as it is.  Spans wait in a bounded queue, which a thread of the SDK empties; a
collector that cannot be reached costs its spans, is reported once (`watched`), and holds up no end for long.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import export as points
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from astuner_trackers.telemetry.collector import Collector, timeout
from astuner_trackers.telemetry.exporter_words import diverted, why
from astuner_trackers.telemetry.records import Attribute, Span
from astuner_trackers.telemetry.watched import Remark, WatchedExporter, went

QUEUE, BATCH = 8192, 256
"""Spans that may wait, and that go together."""
LINGER = 2.0
"""Seconds that a span waits for others."""
FAREWELL = 3.0
"""Seconds that the end waits for a collector that refuses what waits, or is known to be down."""
PATIENCE = 3
"""Times in a row that metrics are refused before no more are sent."""
SCHEMA = "https://opentelemetry.io/schemas/1.41.0"
_ATTRIBUTES = 1024
"""Of one span: a step has more numbers than the SDK's limit of 128."""


def resource(attributes: Mapping[str, Attribute]) -> Resource:
    """Who sends: ``attributes``, and what ``OTEL_SERVICE_NAME`` and ``OTEL_RESOURCE_ATTRIBUTES`` say."""
    found = Resource.create(dict(attributes))
    if str(found.attributes.get("service.name", "")).startswith("unknown_service"):
        found = found.merge(Resource({"service.name": "astuner"}))
    return found


class SpanSender:
    """Sends spans. Its methods are called from one thread and never wait for the collector, but `close`."""

    def __init__(self, collector: Collector, who: Resource, version: str, remark: Remark) -> None:
        def exporter(seconds: float) -> OTLPSpanExporter:
            return OTLPSpanExporter(collector.url, headers=dict(collector.headers), timeout=seconds)

        self._exporter = WatchedExporter(exporter, collector, remark, timeout=timeout("traces"))
        self._ids = _GivenIds()
        self._provider = TracerProvider(
            sampler=ALWAYS_ON,  # episodes were sampled before; a variable is not to sample them again
            resource=who,
            shutdown_on_exit=False,
            id_generator=self._ids,
            span_limits=SpanLimits(max_span_attributes=_ATTRIBUTES),
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                self._exporter,  # type: ignore[arg-type]
                max_queue_size=QUEUE,
                schedule_delay_millis=LINGER * 1000,
                max_export_batch_size=BATCH,
            )
        )
        self._tracer = self._provider.get_tracer("astuner", version, schema_url=SCHEMA)

    def send(self, spans: Sequence[Span]) -> None:
        with diverted():  # what the SDK says of a full queue; `close` counts
            for span in spans:
                self._send(span)

    def _send(self, span: Span) -> None:
        context = Context()
        if span.parent_id is not None:
            context = trace.set_span_in_context(trace.NonRecordingSpan(_context(span.trace_id, span.parent_id)))
        self._ids.next = (span.trace_id, span.span_id)
        made = self._tracer.start_span(
            _plain(span.name),
            context,
            kind=trace.SpanKind[span.kind.upper()],
            attributes=_clean(span.attributes),
            links=[trace.Link(_context(*link)) for link in span.links],
            start_time=_nanoseconds(span.start),
        )
        if made.is_recording():
            self._exporter.made += 1
        for event in span.events:
            made.add_event(event.name, _clean(event.attributes), _nanoseconds(event.time))
        if span.error:
            made.set_status(trace.Status(trace.StatusCode.ERROR, span.error))
        made.end(_nanoseconds(span.end))

    @property
    def made_and_sent(self) -> tuple[int, int]:
        """Spans so far, and those of them that the collector took."""
        return self._exporter.made, self._exporter.sent

    def close(self) -> None:
        """Send what waits, for at most half a minute; say what was lost.

        Only a collector that takes something, or has not answered yet and may, is waited for longer than `FAREWELL`.
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
        """Ends when the queue is empty, or given up, or after the SDK's half a minute."""
        with diverted():
            self._provider.shutdown()


class _GivenIds(IdGenerator):
    """The ids that are given for the next span."""

    def __init__(self) -> None:
        self.next = (0, 0)

    def generate_trace_id(self) -> int:
        return self.next[0]

    def generate_span_id(self) -> int:
        return self.next[1]


class MetricSender:
    """Sends the numbers of steps as gauges; waits for the collector, as long as ``OTEL_EXPORTER_OTLP_TIMEOUT``."""

    def __init__(self, collector: Collector, who: Resource, version: str, remark: Remark) -> None:
        self._collector, self._who, self._remark = collector, who, remark
        self._exporter = OTLPMetricExporter(collector.url, headers=dict(collector.headers))
        self._scope = InstrumentationScope("astuner", version, SCHEMA)
        self._failures = 0

    def send(self, values: Mapping[str, float], attributes: Mapping[str, Attribute]) -> None:
        """:param values: name -> value, at this moment."""
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
                f"the collector at {self._collector.shown} takes no metrics: {why(lines, self._collector)}. No more "
                "are sent"
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
    """``text`` without half surrogates, for which a whole batch would be refused."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()
