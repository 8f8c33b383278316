"""Servers on loopback that write down what they are sent: an OTLP collector, and a stand-in for AgentScope Studio."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Receiver:
    """What came, and how the server behaves: `status`, or `hang` until `released`."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        """(path, headers in lower case, body)."""
        self.answered = 0
        self.status = 200
        self.hang = False
        self.released = threading.Event()
        self.url = ""

    def answer(self, path: str, body: bytes) -> tuple[int, bytes]:
        return self.status, b"{}"


class Collector(Receiver):
    """Decodes spans and metrics with the protocol's own classes."""

    @property
    def resource_spans(self) -> list[Any]:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        bodies = [body for path, _, body in self.requests if path == "/v1/traces"]
        return [r for body in bodies for r in ExportTraceServiceRequest.FromString(body).resource_spans]

    @property
    def spans(self) -> list[dict[str, Any]]:
        return [plain_span(s) for r in self.resource_spans for scope in r.scope_spans for s in scope.spans]

    @property
    def resource(self) -> dict[str, Any]:
        return attributes(self.resource_spans[0].resource.attributes)

    @property
    def metrics(self) -> dict[str, list[tuple[float, dict[str, Any]]]]:
        """Name -> the values it had, each with its attributes."""
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

        found: dict[str, list[tuple[float, dict[str, Any]]]] = {}
        for path, _, body in self.requests:
            if path == "/v1/metrics":
                for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                    for metric in (m for scope in resource.scope_metrics for m in scope.metrics):
                        points = [(p.as_double, attributes(p.attributes)) for p in metric.gauge.data_points]
                        found.setdefault(metric.name, []).extend(points)
        return found


def plain_span(span: Any) -> dict[str, Any]:
    return {
        "name": span.name,
        "trace": span.trace_id,
        "id": span.span_id,
        "parent": span.parent_span_id,
        "start": span.start_time_unix_nano,
        "end": span.end_time_unix_nano,
        "kind": span.kind,
        "error": span.status.message if span.status.code == 2 else None,
        "events": {event.name: attributes(event.attributes) for event in span.events},
        "links": [link.trace_id for link in span.links],
        **attributes(span.attributes),
    }


def attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: value_of(pair.value) for pair in pairs}


def value_of(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [value_of(item) for item in value.array_value.values]
    return getattr(value, kind)


class Studio(Receiver):
    """Refuses what Studio 1.0.9 refuses: fields that are missing or of another type, runs that nobody registered."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: dict[str, dict[str, Any]] = {}
        self.messages: list[dict[str, Any]] = []

    def answer(self, path: str, body: bytes) -> tuple[int, bytes]:
        if self.status != 200:
            return super().answer(path, body)
        given = json.loads(body)
        wrong = self._wrong_run(given) if path == "/trpc/registerRun" else self._wrong_message(given)
        if path not in ("/trpc/registerRun", "/trpc/pushMessage") or wrong:
            return 400, json.dumps({"error": {"message": wrong or "No procedure"}}).encode()
        if path == "/trpc/registerRun":
            self.runs[given["id"]] = given
        else:
            self.messages.append(given)
        return 200, b'{"result":{}}'

    def _wrong_run(self, run: dict[str, Any]) -> str:
        texts = [name for name in ("id", "project", "name", "timestamp") if not isinstance(run.get(name), str)]
        if texts or not isinstance(run.get("pid"), int):
            return f"expected {texts or 'pid'}"
        return "" if run.get("status") in ("running", "pending", "done", "unknown") else "status"

    def _wrong_message(self, push: dict[str, Any]) -> str:
        if push.get("runId") not in self.runs:
            return f"Run with id {push.get('runId')} does not exist"
        names = [name for name in ("replyId", "replyName", "replyRole") if not isinstance(push.get(name), str)]
        message = push.get("msg") or {}
        names += [name for name in ("id", "name", "role", "timestamp") if not isinstance(message.get(name), str)]
        if names or message["id"] in {m["msg"]["id"] for m in self.messages}:
            return f"{names or 'UNIQUE constraint failed: message_table.id'}"
        return next(filter(None, map(wrong_block, message["content"])), "")


def wrong_block(block: dict[str, Any]) -> str:
    texts = {"text": ("text",), "thinking": ("thinking",), "tool_use": ("id", "name"), "tool_result": ("id", "name")}
    if block.get("type") not in texts:
        return f"no such block: {block}"
    if not all(isinstance(block.get(name), str) for name in texts[block["type"]]):
        return f"not a text: {block}"
    if block["type"] == "tool_use" and not isinstance(block.get("input"), dict):
        return f"not an object: {block}"
    return "" if block["type"] != "tool_result" or isinstance(block.get("output"), (str, list)) else "output"


@contextmanager
def serving(receiver: Receiver) -> Iterator[Receiver]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            receiver.requests.append((self.path, {k.lower(): v for k, v in self.headers.items()}, body))
            if receiver.hang:
                receiver.released.wait(60)
            status, text = receiver.answer(self.path, body)
            receiver.answered += 1
            try:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)
            except OSError:
                self.close_connection = True  # who asked went away

        def log_message(self, *args: Any) -> None:
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    receiver.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield receiver
    finally:
        receiver.released.set()
        server.shutdown()
        thread.join()
        server.server_close()
