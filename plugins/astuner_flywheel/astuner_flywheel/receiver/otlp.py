"""From OTLP's bytes to rows of ``span_table``, the columns that AgentScope Studio gives a span.

One decoder: what comes as JSON is turned into the protocol's own messages first, span by span, so that types are
checked by protobuf.  Invariant: a span that cannot be kept is counted with the reason and costs no other one its place.
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from astuner.support import strict_json

Row = dict[str, Any]

LONGEST_ATTRIBUTES = 8 << 20
"""Characters of one span's attributes as JSON."""
_TEXT_KEYS = {"gen_ai.conversation.id"}
"""AgentScope sends this one as JSON text."""
_DEEPEST = 50
"""Parts of a name that become a tree, and values within values: deeper ones could not be written as JSON."""


class NotOtlp(ValueError):
    """The body is no ExportTraceServiceRequest."""


@dataclass
class Decoded:
    """What one request holds."""

    rows: list[Row] = field(default_factory=list)
    rejected: Counter[str] = field(default_factory=Counter)
    """Reason -> spans."""

    @property
    def message(self) -> str:
        return "; ".join(f"{n} × {reason}" for reason, n in self.rejected.most_common(10))


def from_protobuf(raw: bytes) -> Decoded:
    """
    :raises NotOtlp: it is none.
    """
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    try:
        request = ExportTraceServiceRequest.FromString(raw)
    except (DecodeError, ValueError) as e:
        raise NotOtlp(f"the body is no ExportTraceServiceRequest: {e}") from None
    found = Decoded()
    for resource_spans in request.resource_spans:
        resource = _attributes(resource_spans.resource.attributes)
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                _keep(found, span, resource, scope_spans.scope)
    return found


def from_json(raw: bytes) -> Decoded:
    """
    :raises NotOtlp: it is none.
    """
    from google.protobuf.json_format import ParseDict, ParseError
    from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
    from opentelemetry.proto.resource.v1.resource_pb2 import Resource
    from opentelemetry.proto.trace.v1.trace_pb2 import Span

    try:
        body = strict_json.parse(raw, halves=True)
    except ValueError as e:
        raise NotOtlp(f"the body cannot be read as JSON: {e}") from None
    if not _either(body, "resourceSpans", "resource_spans") and body:
        raise NotOtlp(f"the body has no resourceSpans, but {', '.join(map(str, list(body)[:5]))}")
    found = Decoded()
    try:
        for resource_spans in _lists(body, "resourceSpans", "resource_spans"):
            resource = ParseDict(resource_spans.get("resource") or {}, Resource(), ignore_unknown_fields=True)
            for scope_spans in _lists(resource_spans, "scopeSpans", "scope_spans"):
                scope = ParseDict(scope_spans.get("scope") or {}, InstrumentationScope(), ignore_unknown_fields=True)
                for each in _lists(scope_spans, "spans", "spans"):
                    try:
                        span = ParseDict(_with_base64_ids(each), Span(), ignore_unknown_fields=True)
                    except RecursionError:
                        found.rejected["nested too deeply"] += 1
                        continue
                    except (ParseError, ValueError) as e:
                        found.rejected[f"a span that is none: {str(e)[:120]}"] += 1
                        continue
                    _keep(found, span, _attributes(resource.attributes), scope)
    except (ParseError, UnicodeError) as e:
        raise NotOtlp(f"the body is no ExportTraceServiceRequest: {e}") from None
    return found


def _either(body: Mapping[str, Any], *names: str) -> Any:
    return next((body[name] for name in names if body.get(name)), None)


def _lists(body: Mapping[str, Any], *names: str) -> Iterator[Mapping[str, Any]]:
    items = _either(body, *names) or []
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise NotOtlp(f"{names[0]} is not a list of objects")
    yield from items


def _with_base64_ids(span: Mapping[str, Any]) -> dict[str, Any]:
    """Ids are hexadecimal in OTLP's JSON, which is the one place where it is not protobuf's own."""
    found = dict(span)
    if isinstance(found.get("links"), list):
        found["links"] = [_with_base64_ids(link) if isinstance(link, dict) else link for link in found["links"]]
    for names in (("traceId", "trace_id"), ("spanId", "span_id"), ("parentSpanId", "parent_span_id")):
        for name in names:
            if name in found:
                if not isinstance(found[name], str):
                    raise ValueError(f"{name} is no text")
                found[name] = base64.b64encode(bytes.fromhex(found[name])).decode()
    return found


def _keep(found: Decoded, span: Any, resource: dict[str, Any], scope: Any) -> None:
    try:
        _add(found, span, resource, scope)
    except RecursionError:
        found.rejected["nested too deeply"] += 1


def _add(found: Decoded, span: Any, resource: dict[str, Any], scope: Any) -> None:
    reason = ""
    if len(span.trace_id) != 16 or not any(span.trace_id):
        reason = "a trace id that is not 16 bytes, or all zeros"
    elif len(span.span_id) != 8 or not any(span.span_id):
        reason = "a span id that is not 8 bytes, or all zeros"
    elif span.parent_span_id and len(span.parent_span_id) != 8:
        reason = "a parent's id that is not 8 bytes"
    if reason:
        found.rejected[reason] += 1
        return
    flat = _attributes(span.attributes)
    attributes = _json(nested(flat))
    if len(attributes) > LONGEST_ATTRIBUTES:
        found.rejected[f"attributes with more than {LONGEST_ATTRIBUTES:,} characters"] += 1
        return
    start, end = span.start_time_unix_nano, span.end_time_unix_nano
    trace_id, span_id = span.trace_id.hex(), span.span_id.hex()
    any_parent = any(span.parent_span_id)
    usage = {name: _whole(flat.get(f"gen_ai.usage.{name}_tokens")) for name in ("input", "output")}
    found.rows.append(
        {
            "id": f"{trace_id}-{span_id}",
            "traceId": trace_id,
            "spanId": span_id,
            "traceState": span.trace_state or None,
            "parentSpanId": span.parent_span_id.hex() if any_parent else None,
            "flags": span.flags,
            "name": span.name,
            "kind": span.kind,
            "startTimeUnixNano": str(start),
            "endTimeUnixNano": str(end),
            "attributes": attributes,
            "droppedAttributesCount": span.dropped_attributes_count,
            "events": _json([_event(event) for event in span.events]),
            "droppedEventsCount": span.dropped_events_count,
            "links": _json([{"traceId": link.trace_id.hex(), "spanId": link.span_id.hex()} for link in span.links]),
            "droppedLinksCount": span.dropped_links_count,
            "status": _json({"code": span.status.code, "message": span.status.message}),
            "resource": _json({"attributes": nested(resource)}),
            "scope": _json({"name": scope.name, "version": scope.version, "attributes": {}}),
            "statusCode": span.status.code,
            "serviceName": _text(resource.get("service.name")),
            "operationName": _text(flat.get("gen_ai.operation.name")),
            "instrumentationName": scope.name or None,
            "instrumentationVersion": scope.version or None,
            "model": _text(flat.get("gen_ai.request.model")),
            "inputTokens": usage["input"],
            "outputTokens": usage["output"],
            "totalTokens": None if None in usage.values() else sum(filter(None, usage.values())),
            "conversationId": _unquoted(flat.get("gen_ai.conversation.id")),
            "latencyNs": float(max(end - start, 0)),
            "responseId": _text(flat.get("gen_ai.response.id")),
        }
    )


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """``{"a.b": 1}`` as ``{"a": {"b": 1}}``.

    A key that would have to be a value and a tree at once stays flat, and so does one of more than 50 parts.
    """
    found: dict[str, Any] = {}
    for name in sorted(flat, key=len):  # a value is in its place before a tree could be
        if name.count(".") >= _DEEPEST:
            found[name] = flat[name]
            continue
        *path, last = name.split(".")
        inner: Any = found
        for part in path:
            inner = inner.setdefault(part, {}) if isinstance(inner, dict) else None
        if isinstance(inner, dict) and last not in inner:
            inner[last] = flat[name]
        else:
            found[name] = flat[name]
    return found


def _attributes(pairs: Any) -> dict[str, Any]:
    found = {pair.key: _value(pair.value) for pair in pairs}
    return {name: _unquoted(value) if name in _TEXT_KEYS else value for name, value in found.items()}


def _value(value: Any, depth: int = 0) -> Any:
    kind = value.WhichOneof("value")
    if kind is None or depth > _DEEPEST:
        return None
    if kind == "array_value":
        return [_value(item, depth + 1) for item in value.array_value.values]
    if kind == "kvlist_value":
        return {pair.key: _value(pair.value, depth + 1) for pair in value.kvlist_value.values}
    if kind == "bytes_value":
        return base64.b64encode(value.bytes_value).decode()
    found = getattr(value, kind)
    return None if isinstance(found, float) and not math.isfinite(found) else found


def _event(event: Any) -> dict[str, Any]:
    attributes = nested(_attributes(event.attributes))
    return {"name": event.name, "timeUnixNano": str(event.time_unix_nano), "attributes": attributes}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"))


def _text(value: Any) -> str | None:
    return None if value is None or isinstance(value, (dict, list)) else str(value)


def _unquoted(value: Any) -> str | None:
    if isinstance(value, str) and value.startswith('"'):
        try:
            value = json.loads(value)
        except ValueError:
            return str(value)
    return _text(value)


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 53 else None
