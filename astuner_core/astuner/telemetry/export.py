"""Spans and numbers to a collector, through OpenTelemetry's SDK and its OTLP exporters.

The provider is our own and never the process's (`opentelemetry.trace.set_tracer_provider` is not called), so what an
agent framework sets up for itself stays as it is.  Spans wait in a bounded queue, which a thread of the SDK empties; a
collector that cannot be reached costs its spans and is reported once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import export as points
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from astuner.telemetry.collector import Collector
from astuner.telemetry.records import Attribute, Span

QUEUE, BATCH = 8192, 256
"""Spans that may wait, and that go together."""
LINGER = 2.0
"""Seconds that a span waits for others."""
PATIENCE = 3
"""Times in a row that metrics are refused before no more are sent."""
SCHEMA = "https://opentelemetry.io/schemas/1.41.0"
_ATTRIBUTES = 1024
"""Of one span: a step has more numbers than the SDK's limit of 128."""

Remark = Callable[[str], None]


def resource(attributes: Mapping[str, Attribute]) -> Resource:
    """Who sends: ``attributes``, and what ``OTEL_SERVICE_NAME`` and ``OTEL_RESOURCE_ATTRIBUTES`` say."""
    found = Resource.create(dict(attributes))
    if str(found.attributes.get("service.name", "")).startswith("unknown_service"):
        found = found.merge(Resource({"service.name": "astuner"}))
    return found


class SpanSender:
    """Sends spans. Its methods are called from one thread and never wait for the collector, but `close`."""

    def __init__(self, collector: Collector, who: Resource, version: str, remark: Remark) -> None:
        self._exporter = _Watched(OTLPSpanExporter(collector.url, headers=dict(collector.headers)), collector, remark)
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
        with _diverted():  # what the SDK says of a full queue; `close` counts
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
        """Send what waits, for at most half a minute; say what was lost."""
        self._exporter.closing = True
        with _diverted():
            self._provider.shutdown()
        self._exporter.sum_up()


class _GivenIds(IdGenerator):
    """The ids that are given for the next span."""

    def __init__(self) -> None:
        self.next = (0, 0)

    def generate_trace_id(self) -> int:
        return self.next[0]

    def generate_span_id(self) -> int:
        return self.next[1]


class _Watched:
    """An exporter, and what became of what it was given."""

    def __init__(self, inner: Any, collector: Collector, remark: Remark) -> None:
        self._inner, self._collector, self._remark = inner, collector, remark
        self.made = self.sent = 0
        self.closing = False
        self._reported = self._given_up = False

    def export(self, spans: Sequence[Any]) -> SpanExportResult:
        if self._given_up:
            return SpanExportResult.FAILURE
        with _diverted() as lines:
            went = _went(self._inner.export, spans, SpanExportResult.SUCCESS, lines)
        if went:
            self.sent += len(spans)
            return SpanExportResult.SUCCESS
        self._given_up = self.closing  # nobody waits for a collector that does not answer, once the run is over
        if not self._reported:
            self._reported = True
            self._remark(
                f"the collector at {self._collector.shown} takes no spans: {_reason(lines, self._collector)}; nothing "
                "waits for it, and it is sent those that come later"
            )
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return True

    def sum_up(self) -> None:
        if lost := self.made - self.sent:
            self._remark(f"{lost:,} of {self.made:,} spans did not reach the collector at {self._collector.shown}")


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
        with _diverted() as lines:
            went = _went(self._exporter.export, data, points.MetricExportResult.SUCCESS, lines)
        if went:
            self._failures = 0
            return
        self._failures += 1
        if self._failures == PATIENCE:
            self._remark(
                f"the collector at {self._collector.shown} takes no metrics: {_reason(lines, self._collector)}; "
                "no more are sent"
            )

    def close(self) -> None:
        self._exporter.shutdown()


def _went(export: Callable[[Any], Any], what: Any, success: Any, lines: list[str]) -> bool:
    """Whether an exporter took ``what``; older ones raise where nobody takes the connection."""
    try:
        return bool(export(what) is success)
    except Exception as e:  # whatever it is: the SDK's thread would only log it, for every batch
        lines.append(f"{type(e).__name__}: {e}")
        return False


def _context(trace_id: int, span_id: int) -> trace.SpanContext:
    return trace.SpanContext(trace_id, span_id, is_remote=False, trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED))


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def _clean(attributes: Mapping[str, Attribute]) -> dict[str, Any]:
    return {_plain(key): _plain(value) if isinstance(value, str) else value for key, value in attributes.items()}


def _plain(text: str) -> str:
    """``text`` without half surrogates, for which a whole batch would be refused."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


# What the exporters log is repeated for every batch, and names URLs with their passwords: the first failure is reported
# in our own words, and what else is logged in our threads, while they export, is dropped.

_LOGGERS = (
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.exporter.otlp.proto.http.metric_exporter",
    "opentelemetry.sdk._shared_internal",
    "opentelemetry.sdk.trace.export",
)
_ours = threading.local()


class _Divert(logging.Filter):
    """Keeps what is logged by threads of ours."""

    def filter(self, record: logging.LogRecord) -> bool:
        lines: list[str] | None = getattr(_ours, "lines", None)
        if lines is None:
            return True
        lines.append(record.getMessage())
        return False


_divert = _Divert()


@contextmanager
def _diverted() -> Iterator[list[str]]:
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_divert)  # once: it is the same object
    lines: list[str] = []
    _ours.lines = lines
    try:
        yield lines
    finally:
        _ours.lines = None


def _reason(lines: Sequence[str], collector: Collector) -> str:
    """What the exporter said first, which names the cause; a later line only says that it gave up."""
    text = lines[0] if lines else "it gave no answer in time"
    return collector.without_secrets(text.rstrip("."))[:300]
