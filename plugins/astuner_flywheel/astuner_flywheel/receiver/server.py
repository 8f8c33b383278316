"""Routes of the collector: ``/v1/traces`` and ``/v1/logs`` (OTLP), ``/feedback``, Langfuse's API and ``/metrics``.

On loopback no key is required by default, but web pages are kept out: they can use neither a host name that resolves to
loopback (DNS rebinding) nor the content types without a preflight request, which is not answered. OTLP responses use
the encoding of the request: success is an ``ExportTraceServiceResponse`` (with ``partial_success`` if spans were
rejected), failure a ``google.rpc.Status``. Source: the OpenTelemetry Protocol specification 1.x, "OTLP/HTTP response".
Invariant: a success response is sent only after the data is on disk.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import zlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from astuner import in_daemon_thread
from astuner_flywheel.receiver.store import Decoded, NotOtlp, from_json, from_protobuf
from astuner_flywheel.traces.conversation import BadFeedback, read_given
from astuner_flywheel.traces.exports import NoRow, opinion
from astuner_gateway.endpoint.errors import ApiError
from astuner_gateway.gate import HEALTH, Gate, check_key, json_answer, not_found, read_body
from astuner_http.strict_json import parse_json

if TYPE_CHECKING:
    from aiohttp import web

    from astuner_flywheel.receiver.store import Store

T = TypeVar("T")

MAX_UNPACKED = 32 << 20
"""Maximum bytes of an unpacked request."""
AT_ONCE = 4
"""Maximum number of requests that are unpacked and stored concurrently."""
TRACES, LOGS, FEEDBACK, METRICS = "/v1/traces", "/v1/logs", "/feedback", "/metrics"
LANGFUSE_TRACES, SCORES, INGESTION = "/api/public/otel/v1/traces", "/api/public/scores", "/api/public/ingestion"
"""Paths to which Langfuse's SDK sends spans and scores. Versions before 5 send batches of scores to the last one."""
PROTOBUF, JSON = "application/x-protobuf", "application/json"
_DECODERS: dict[str, dict[str, Callable[[bytes], Decoded]]] = {
    TRACES: {PROTOBUF: from_protobuf, JSON: from_json},
    LANGFUSE_TRACES: {PROTOBUF: from_protobuf, JSON: from_json},
    LOGS: {PROTOBUF: partial(from_protobuf, logs=True), JSON: from_json},
}
_MOST_SCORES = 1000
"""Maximum scores in one request."""
_CODES = {400: 3, 401: 16, 403: 7, 404: 5, 413: 8, 415: 3, 500: 13, 503: 14}
"""Map HTTP statuses to gRPC codes."""


class Handler(Gate):
    """Answer all requests of a server.

    :param host: Address of the server.
    :param key: Key that requests must contain. Empty: none.
    """

    what = "collector"
    most_bytes = 16 << 20

    def __init__(self, store: Store, *, host: str, key: str = "") -> None:
        super().__init__(host)
        self._key, self._store = key, store
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._writing = asyncio.Lock()
        self.counts: Counter[str] = Counter(
            {"requests": 0, "spans": 0, "duplicates": 0, "rejected_spans": 0, "feedback": 0, "refused": 0}
        )

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        self.counts["requests"] += 1
        return await super().__call__(request)

    async def reply(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        if self._key:
            check_key(
                request,
                self._key,
                "the collector's key in the header Authorization: Bearer KEY (exporters take headers from "
                "OTEL_EXPORTER_OTLP_HEADERS)",
            )
        asked = (request.method, request.path)
        if request.method == "POST" and request.path in _DECODERS:
            return await self._signals(request)
        if request.method == "POST" and request.path in (SCORES, INGESTION):
            return await self._scores(request, request_id)
        if asked == ("POST", FEEDBACK):
            return json_answer(await self._feedback(request), request_id)
        if asked == ("GET", METRICS):
            kept = await self._write(self._store.counts)
            return json_answer({"since_start": dict(self.counts), "in_file": kept}, request_id)
        posts = (f"POST {path}" for path in (TRACES, LOGS, FEEDBACK))
        raise not_found(request, (*posts, f"GET {METRICS}", f"GET {HEALTH}"))

    def error_of(self, error: Exception) -> ApiError:
        if isinstance(error, (sqlite3.OperationalError, OSError)) and not isinstance(error, ConnectionResetError):
            # a full disk or a lock, which may be temporary
            return ApiError(503, f"cannot store the data now ({error}); send it again", code="storage", retry_after=10)
        return super().error_of(error)

    def refuse(self, error: ApiError, request: web.BaseRequest, request_id: str) -> web.Response:
        """Send an error response, in OTLP's format on OTLP's routes."""
        self.counts["refused"] += 1
        if request.path not in _DECODERS:
            return super().refuse(error, request, request_id)
        kind = _content_type(request)
        return _refused(error.status, error.message, kind, error.retry_after)

    async def _signals(self, request: web.BaseRequest) -> web.Response:
        kind = _content_type(request)
        decoder = _DECODERS[request.path].get(kind)
        if decoder is None:
            raise ApiError(415, f"the content type {kind[:80]!r} is not supported; send {PROTOBUF} or {JSON}")
        body = await read_body(request, "gzip")
        async with self._slots:
            try:
                decoded = await in_daemon_thread(lambda: decoder(_unpacked(request, body)))
            except NotOtlp as e:
                raise ApiError(400, str(e)) from None
            new = await self._write(self._store.add_spans, decoded.rows, decoded.events)
        self.counts["spans"] += new
        self.counts["duplicates"] += len(decoded.rows) - new
        self.counts["events"] += len(decoded.events)
        self.counts["rejected_logs" if request.path == LOGS else "rejected_spans"] += sum(decoded.rejected.values())
        return _accepted(decoded, kind, "log_records" if request.path == LOGS else "spans")

    async def _scores(self, request: web.BaseRequest, request_id: str) -> web.Response:
        """Store Langfuse's scores as feedback. Invalid ones are rejected individually, as Langfuse does."""
        if _content_type(request) != JSON:
            raise ApiError(415, f"the content type must be {JSON}", code="unsupported_type")
        raw = _unpacked(request, await read_body(request, "gzip"))
        try:
            found = parse_json(b'{"batch":%b}' % raw if raw.lstrip()[:1] == b"[" else raw)
        except ValueError as e:
            raise ApiError(400, f"the scores cannot be read as JSON: {e}", code="invalid_json") from None
        batch = found.get("batch", [found])
        if not isinstance(batch, list) or len(batch) > _MOST_SCORES:
            raise ApiError(400, f"scores are a list of at most {_MOST_SCORES} objects", code="invalid_scores")
        errors = []
        for number, each in enumerate(batch):
            body = each.get("body", each) if isinstance(each, dict) else None
            try:
                if not isinstance(body, dict) or not str(each.get("type", "score-create")).startswith("score"):
                    raise NoRow("not a score; send spans as OTLP")
                await self._write(self._store.add_feedback, opinion(body))
                self.counts["feedback"] += 1
            except NoRow as e:
                errors.append({"id": str(number), "status": 400, "message": str(e)})
        counts = {"accepted": len(batch) - len(errors), "rejected": len(errors)}
        if request.path == SCORES:
            if not errors:
                return json_answer({"message": "Accepted"}, request_id, 202)
            return json_answer({**counts, "errors": errors}, request_id, 207)
        return json_answer({"successes": [], "errors": errors}, request_id, 207)

    async def _feedback(self, request: web.BaseRequest) -> dict[str, Any]:
        if _content_type(request) != JSON:
            raise ApiError(415, f"the content type must be {JSON}", code="unsupported_type")
        body = await read_body(request, "gzip")
        try:
            given = read_given(parse_json(_unpacked(request, body)))
        except BadFeedback as e:
            raise ApiError(422, str(e), param=e.param, code="invalid_feedback") from None
        except ValueError as e:
            raise ApiError(422, f"the feedback cannot be read as JSON: {e}", code="invalid_json") from None
        number, seen = await self._write(self._store.add_feedback, given)
        self.counts["feedback"] += 1
        return {"stored": number, "seen": seen}

    async def _write(self, work: Callable[..., T], *args: Any) -> T:
        """Write requests one at a time in a thread. A write completes even if the client disconnects."""

        async def alone() -> T:
            async with self._writing:
                return await in_daemon_thread(work, *args)

        return await asyncio.shield(asyncio.ensure_future(alone()))

    async def finished(self) -> None:
        """Wait for writes in progress."""
        async with self._writing:
            return


def _content_type(request: web.BaseRequest) -> str:
    return request.headers.get("Content-Type", "").partition(";")[0].strip().lower()


def _accepted(decoded: Decoded, kind: str, what: str) -> web.Response:
    """Return a success response with the number of rejected ``what`` and the reasons."""
    from aiohttp import web
    from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

    rejected = sum(decoded.rejected.values())
    if kind == JSON:
        name = "rejectedSpans" if what == "spans" else "rejectedLogRecords"
        partial = {name: str(rejected), "errorMessage": decoded.message}
        return web.Response(text=json.dumps({"partialSuccess": partial} if rejected else {}), content_type=JSON)
    response = ExportTraceServiceResponse() if what == "spans" else ExportLogsServiceResponse()
    if rejected:
        setattr(response.partial_success, f"rejected_{what}", rejected)
        response.partial_success.error_message = decoded.message
    return web.Response(body=response.SerializeToString(), content_type=PROTOBUF)


def _refused(status: int, message: str, kind: str, retry_after: int | None) -> web.Response:
    """Return an error response. Exporters retry only after 503."""
    from aiohttp import web
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTracePartialSuccess

    code, headers = _CODES.get(status, 2), {} if retry_after is None else {"Retry-After": str(retry_after)}
    if kind == JSON:
        text = json.dumps({"code": code, "message": message})
        return web.Response(text=text, status=status, content_type=JSON, headers=headers)
    # google.rpc.Status has the same wire format as this OTLP message: field 1 a number, field 2 a text.
    clean = message.encode("utf-8", "replace").decode()
    body = ExportTracePartialSuccess(rejected_spans=code, error_message=clean).SerializeToString()
    return web.Response(body=body, status=status, content_type=PROTOBUF, headers=headers)


def _unpacked(request: web.BaseRequest, raw: bytes) -> bytes:
    """Return the unpacked request body.

    :raises ApiError: The body is too large, or not valid gzip.
    """
    if request.headers.get("Content-Encoding", "").strip().lower() != "gzip":
        return raw
    unpacking = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        found = unpacking.decompress(raw, MAX_UNPACKED + 1)
    except zlib.error as e:
        raise ApiError(400, f"the body is not gzip: {e}", code="incomplete") from None
    if len(found) > MAX_UNPACKED:
        what = f"the unpacked request exceeds {MAX_UNPACKED >> 20} MiB; send smaller batches"
        raise ApiError(413, what, code="request_too_large")
    if not unpacking.eof:
        raise ApiError(400, "the gzip body is incomplete", code="incomplete")
    return found
