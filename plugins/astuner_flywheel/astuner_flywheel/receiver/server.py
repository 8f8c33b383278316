"""The collector's routes: ``/v1/traces`` as OTLP has it, ``/feedback`` for users' opinions, and what there is so far.

On loopback nobody needs a key unless the person set one, but only programs get in: a web page can neither come under a
name of its own that it lets point here (DNS rebinding) nor send either content type without asking first, which is not
answered.  Invariant: a request is answered with success when what it brought is on the disk, and not before.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import sqlite3
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from astuner.support import strict_json
from astuner.support.threads import in_daemon_thread
from astuner_flywheel.receiver.otlp import Decoded, NotOtlp, from_json, from_protobuf
from astuner_flywheel.receiver.otlp_answers import JSON, PROTOBUF, accepted, refused
from astuner_flywheel.traces.feedback import BadFeedback, read_given
from astuner_gateway.endpoint.errors import ApiError, unexpected
from astuner_gateway.endpoint.handler import json_answer
from astuner_gateway.listening import is_own_name

if TYPE_CHECKING:
    from aiohttp import web

    from astuner_flywheel.receiver.store import Store

T = TypeVar("T")

MAX_BODY = 16 << 20
"""Bytes of a request as it comes."""
MAX_UNPACKED = 32 << 20
"""Bytes of a request when it is unpacked."""
AT_ONCE = 4
"""Requests that are unpacked and kept at the same time; the others wait."""
BODY_TIMEOUT = 60.0
TRACES, FEEDBACK = "/v1/traces", "/feedback"
_ROUTES = f"POST {TRACES}, POST {FEEDBACK}, GET /metrics and GET /health"
_DECODERS: dict[str, Callable[[bytes], Decoded]] = {PROTOBUF: from_protobuf, JSON: from_json}


@dataclass(frozen=True, kw_only=True)
class Terms:
    """On what terms the collector runs."""

    host: str
    loopback: bool
    """Whether only this machine can reach it."""
    key: str = field(default="", repr=False)
    """What every request must bring; empty: none."""


class Handler:
    """Answers all requests of one server."""

    def __init__(self, terms: Terms, store: Store) -> None:
        self._terms, self._store = terms, store
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._writing = asyncio.Lock()
        self.counts: Counter[str] = Counter(
            {"requests": 0, "spans": 0, "duplicates": 0, "rejected_spans": 0, "feedback": 0, "refused": 0}
        )

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        request_id = f"req_{secrets.token_hex(12)}"
        of_otlp = request.path == TRACES
        kind = _content_type(request) if of_otlp else JSON
        self.counts["requests"] += 1
        try:
            return await self._answer(request, request_id, kind)
        except ApiError as e:
            error = e
        except (ConnectionResetError, asyncio.IncompleteReadError):
            error = ApiError(400, "the connection is lost")  # nobody reads it
        except (sqlite3.OperationalError, OSError) as e:  # a full disk, a lock: it may be better later
            error = ApiError(503, f"it cannot be kept now ({e}); send it again", code="storage", retry_after=10)
        except Exception as e:
            error = unexpected(e)
        self.counts["refused"] += 1
        if of_otlp:
            as_kind = kind if kind in _DECODERS else PROTOBUF
            return refused(error.status, error.message, as_kind, retry_after=error.retry_after)
        response = json_answer(error.openai(), request_id, error.status)
        if error.retry_after is not None:
            response.headers["Retry-After"] = str(error.retry_after)
        return response

    async def _answer(self, request: web.BaseRequest, request_id: str, kind: str) -> web.StreamResponse:
        terms = self._terms
        if terms.loopback and not is_own_name(request.headers.get("Host", ""), terms.host):
            raise ApiError(403, "this collector is for this machine, under the name localhost", code="wrong_host")
        asked = (request.method, request.path)
        if asked == ("GET", "/health"):
            return json_answer({"status": "ok"}, request_id)
        self._check_key(request)
        if asked == ("POST", TRACES):
            return await self._traces(request, kind)
        if asked == ("POST", FEEDBACK):
            return json_answer(await self._feedback(request), request_id)
        if asked == ("GET", "/metrics"):
            kept = await self._write(self._store.counts)
            return json_answer({"since_start": dict(self.counts), "in_file": kept}, request_id)
        raise ApiError(404, f"there is no {request.method} {request.path[:200]}; there are {_ROUTES}", code="not_found")

    async def _traces(self, request: web.BaseRequest, kind: str) -> web.Response:
        decoder = _DECODERS.get(kind)
        if decoder is None:
            raise ApiError(415, f"the content type is {kind[:80]!r}; send {PROTOBUF} or {JSON}")
        body = await _body(request)
        async with self._slots:
            try:
                decoded = await in_daemon_thread(lambda: decoder(body.unpacked()))
            except NotOtlp as e:
                raise ApiError(400, str(e)) from None
            new = await self._write(self._store.add_spans, decoded.rows)
        self.counts["spans"] += new
        self.counts["duplicates"] += len(decoded.rows) - new
        self.counts["rejected_spans"] += sum(decoded.rejected.values())
        return accepted(decoded, kind)

    async def _feedback(self, request: web.BaseRequest) -> dict[str, Any]:
        if _content_type(request) != JSON:
            raise ApiError(415, f"the content type must be {JSON}", code="unsupported_type")
        body = await _body(request)
        try:
            given = read_given(strict_json.parse(body.unpacked()))
        except BadFeedback as e:
            raise ApiError(422, str(e), param=e.param, code="invalid_feedback") from None
        except ValueError as e:
            raise ApiError(422, f"the feedback cannot be read as JSON: {e}", code="invalid_json") from None
        row: dict[str, Any] = {
            "response_id": given.response_id or None,
            "trace_id": given.trace_id or None,
            "conversation_id": given.conversation_id or None,
            "rating": given.feedback.rating,
            "correction": given.feedback.correction or None,
            "comment": given.feedback.comment or None,
        } | ({"time": given.time} if given.time else {})
        number, seen = await self._write(self._store.add_feedback, row)
        self.counts["feedback"] += 1
        return {"stored": number, "seen": seen}

    async def _write(self, work: Callable[..., T], *args: Any) -> T:
        """One after the other, each beside the loop; done even when the client goes away meanwhile."""

        async def alone() -> T:
            async with self._writing:
                return await in_daemon_thread(work, *args)

        return await asyncio.shield(asyncio.ensure_future(alone()))

    async def finished(self) -> None:
        """Wait for what is being written."""
        async with self._writing:
            return

    def _check_key(self, request: web.BaseRequest) -> None:
        if not self._terms.key:
            return
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        same = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), self._terms.key.encode())
        if scheme.lower() != "bearer" or not same:
            raise ApiError(
                401,
                "this collector wants its key, as the header Authorization: Bearer KEY "
                "(exporters take it from OTEL_EXPORTER_OTLP_HEADERS)",
                code="invalid_api_key",
            )


def _content_type(request: web.BaseRequest) -> str:
    return request.headers.get("Content-Type", "").partition(";")[0].strip().lower()


@dataclass(frozen=True)
class _Body:
    raw: bytes
    packed: bool

    def unpacked(self) -> bytes:
        """
        :raises ApiError: it is too large, or no gzip.
        """
        return _unpacked(self.raw) if self.packed else self.raw


async def _body(request: web.BaseRequest) -> _Body:
    """The body as it came.

    :raises ApiError: it is too large, packed in a way that is not known, or does not come.
    """
    encoding = request.headers.get("Content-Encoding", "").strip().lower()
    if encoding not in ("", "identity", "gzip"):
        what = f"the body has Content-Encoding {encoding[:40]!r}; send gzip or none"
        raise ApiError(415, what, code="unsupported_encoding")
    if (request.content_length or 0) > MAX_BODY:
        raise _too_large(MAX_BODY)
    try:
        raw = await asyncio.wait_for(_read(request), BODY_TIMEOUT)
    except asyncio.TimeoutError:
        raise ApiError(400, f"the body did not come within {BODY_TIMEOUT:g} s", code="incomplete") from None
    return _Body(raw, packed=encoding == "gzip")


async def _read(request: web.BaseRequest) -> bytes:
    from aiohttp import web

    found = bytearray()
    try:
        async for piece in request.content.iter_any():
            found += piece
            if len(found) > MAX_BODY:
                raise _too_large(MAX_BODY)
    except (web.RequestPayloadError, web.HTTPBadRequest) as e:
        raise ApiError(400, f"the body cannot be read: {e}", code="incomplete") from None
    return bytes(found)


def _unpacked(raw: bytes) -> bytes:
    unpacking = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        found = unpacking.decompress(raw, MAX_UNPACKED + 1)
    except zlib.error as e:
        raise ApiError(400, f"the body is no gzip: {e}", code="incomplete") from None
    if len(found) > MAX_UNPACKED:
        raise _too_large(MAX_UNPACKED, " when it is unpacked")
    if not unpacking.eof:
        raise ApiError(400, "the body's gzip ends too early", code="incomplete")
    return found


def _too_large(limit: int, when: str = "") -> ApiError:
    what = f"the request has more than {limit >> 20} MiB{when}; send less at once"
    return ApiError(413, what, code="request_too_large")
