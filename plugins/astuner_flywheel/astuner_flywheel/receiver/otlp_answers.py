"""What OTLP over HTTP demands as answers, in the encoding that was asked in.

Success is an ``ExportTraceServiceResponse`` (with ``partial_success`` where spans were refused), failure a
``google.rpc.Status``; the latter is two fields, written here by hand rather than with another dependency.
Source: the OpenTelemetry Protocol specification 1.x, "OTLP/HTTP response".
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiohttp import web

    from astuner_flywheel.receiver.otlp import Decoded

PROTOBUF, JSON = "application/x-protobuf", "application/json"
_CODES = {400: 3, 401: 16, 403: 7, 404: 5, 413: 8, 415: 3, 500: 13, 503: 14}
"""HTTP status -> the code of gRPC that says the same."""


def accepted(decoded: Decoded, kind: str) -> web.Response:
    """200: what could be kept is kept; says how many spans could not, and why."""
    from aiohttp import web

    rejected = sum(decoded.rejected.values())
    if kind == JSON:
        partial = {"rejectedSpans": str(rejected), "errorMessage": decoded.message}
        return web.Response(text=json.dumps({"partialSuccess": partial} if rejected else {}), content_type=JSON)
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

    response = ExportTraceServiceResponse()
    if rejected:
        response.partial_success.rejected_spans = rejected
        response.partial_success.error_message = decoded.message
    return web.Response(body=response.SerializeToString(), content_type=PROTOBUF)


def refused(status: int, message: str, kind: str, *, retry_after: int | None = None) -> web.Response:
    """A failure. Exporters send again after 503 only; everything else would be refused again."""
    from aiohttp import web

    code = _CODES.get(status, 2)
    headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
    if kind == JSON:
        text = json.dumps({"code": code, "message": message})
        return web.Response(text=text, status=status, content_type=JSON, headers=headers)
    return web.Response(body=status_message(code, message), status=status, content_type=PROTOBUF, headers=headers)


def status_message(code: int, message: str) -> bytes:
    """``google.rpc.Status``: field 1 the code, field 2 the message."""
    text = message.encode("utf-8", "replace")
    return b"\x08" + _varint(code) + b"\x12" + _varint(len(text)) + text


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])
