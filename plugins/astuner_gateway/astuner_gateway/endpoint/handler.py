"""From an HTTP request to its answer: who asks, what, and how the answer goes out.

Invariant: every request ends in an answer of the API it was made to, and none before its key was found valid.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol

from astuner.contracts.errors import AstunerError
from astuner.support.threads import in_daemon_thread
from astuner_gateway.endpoint import anthropic_messages, openai_chat, openai_responses
from astuner_gateway.endpoint.access import DEFAULT_MODEL
from astuner_gateway.endpoint.errors import ApiError, from_exception, unexpected, unknown_key
from astuner_gateway.endpoint.json_body import MAX_BYTES, parse
from astuner_gateway.endpoint.replay import Identity, Outcome, Replays
from astuner_gateway.endpoint.request import ChatRequest, Dialect, answer
from astuner_gateway.endpoint.sse import KEEP_ALIVE, encode
from astuner_gateway.listening import is_own_name, quiet_http_logger

if TYPE_CHECKING:
    from aiohttp import web

    from astuner_gateway.endpoint.keys import KeyRing, Pass

DIALECTS = {d.route: d for d in (openai_chat.DIALECT, openai_responses.DIALECT, anthropic_messages.DIALECT)}
MODELS = "/v1/models"
HEALTH = "/health"

_QUIET = 2.0
"""Seconds after which a waiting stream is begun, and between its comments."""
_BODY_TIMEOUT = 60.0
_LONG = 32 << 10
"""Bytes of a body that is read in a thread of its own, so that the others' requests go on meanwhile."""


class Handler:
    """Answers all requests of one server.

    :param host: where the server listens.
    :param loopback: whether only this machine can reach it; then the Host header must say so too, or else a web page
        could reach it under a name of its own (DNS rebinding).
    """

    def __init__(self, keys: KeyRing, replays: Replays, host: str, *, loopback: bool) -> None:
        self._host = host.lower()
        self._keys = keys
        self._replays = replays
        self._loopback = loopback

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        dialect = DIALECTS.get(request.path)
        request_id = f"req_{secrets.token_hex(12)}"
        try:
            self._check_host(request)
            if dialect is not None and request.method == "POST":
                return await self._reply(request, dialect, request_id)
            return json_answer(self._other(request), request_id)
        except ApiError as e:
            error = e
        except AstunerError as e:
            error = from_exception(e)
        except ConnectionResetError:
            error = ApiError(400, "the connection is lost")  # nobody reads it
        except Exception as e:
            error = unexpected(e)
        return refusal(error, dialect or _dialect_of(request), request_id)

    def _check_host(self, request: web.BaseRequest) -> None:
        if not self._loopback:
            return
        if not is_own_name(request.headers.get("Host", ""), self._host):
            known = "localhost or a loopback address such as 127.0.0.1"
            raise ApiError(403, f"this endpoint is for this machine, under the name {known}", code="wrong_host")

    def _other(self, request: web.BaseRequest) -> dict[str, Any]:
        """The routes that are not a model's."""
        path = request.path
        if path == HEALTH and request.method in ("GET", "HEAD"):
            return {"status": "ok"}
        if path in DIALECTS:
            raise ApiError(405, f"{path} takes POST requests only", code="method_not_allowed")
        holder = self._holder(request)
        if request.method in ("GET", "HEAD"):
            if path == MODELS:
                return _models(holder.tuner.model_name)
            if path.startswith(MODELS + "/"):
                return _model(path[len(MODELS) + 1 :])
        routes = ", ".join(f"POST {route}" for route in DIALECTS)
        raise ApiError(
            404, f"there is no {request.method} {path[:200]}; there are {routes}, GET {MODELS}", code="not_found"
        )

    def _holder(self, request: web.BaseRequest) -> Pass:
        holder = self._keys.find(request.headers)
        if holder is None:
            raise unknown_key()
        return holder

    async def _reply(self, request: web.BaseRequest, dialect: Dialect, request_id: str) -> web.StreamResponse:
        holder = self._holder(request)
        raw = await read_body(request)
        model = getattr(holder.tuner, "model_name", DEFAULT_MODEL)

        def understand() -> ChatRequest:
            return dialect.read(parse(raw), model)

        chat = await in_daemon_thread(understand) if len(raw) > _LONG else understand()
        identity = Identity(holder.digest, dialect.route, hashlib.sha256(raw).digest())
        count = request.headers.get("x-stainless-retry-count", "")
        made: list[int] = []
        job = self._replays.attach(
            identity,
            lambda: _produce(chat, dialect, holder, made),
            on_lost=lambda: holder.tuner.leave_out(made),
            retry=int(count) if count.isdecimal() and len(count) < 6 else 0,
            name=request.headers.get("Idempotency-Key", "")[:255],
        )
        delivered = False
        try:
            response = await send(request, dialect, chat, job, request_id)
            delivered = True
            return response
        finally:
            self._replays.detach(job, delivered=delivered)


def make_server(handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]) -> web.Server:
    """An aiohttp server that takes long bodies, cancels handlers whose client is gone, and logs no keys."""
    from aiohttp import web

    loop = asyncio.get_running_loop()
    logger = quiet_http_logger("astuner.endpoint.http")

    def make_request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
        return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=MAX_BYTES)

    class Protocol(web.RequestHandler):
        """Answers in JSON what aiohttp refuses before a handler sees it."""

        def handle_error(self, request: Any, status: int = 500, exc: Any = None, message: Any = None) -> Any:
            super().handle_error(request, status, exc, message)  # logs it, and raises where an answer has begun
            error = ApiError(status, "this is no HTTP request that can be read", code="malformed_request")
            response = refusal(error, _dialect_of(request), f"req_{secrets.token_hex(12)}")
            response.force_close()
            return response

    class Server(web.Server):
        def __call__(self) -> web.RequestHandler:
            # Bodies stay as they came: a compressed one is refused, and none unfolds before its key was looked at.
            none: Any = None  # allowed, whatever its type says
            return Protocol(self, loop=loop, access_log=none, logger=logger, auto_decompress=False)

    return Server(handler, request_factory=make_request, handler_cancellation=True)


def _produce(chat: ChatRequest, dialect: Dialect, holder: Pass, made: list[int]) -> Coroutine[None, None, Outcome]:
    """The outcome of a request; the turns it took are added to ``made``."""

    async def produce() -> Outcome:
        try:
            answers = await answer(chat, holder)
            made.extend(each.reply.turn_index for each in answers)
            whole = dialect.body(chat, answers, int(time.time()))
            if chat.stream:
                return encode(dialect.events(chat, whole)) + dialect.end
            return json.dumps(whole, separators=(",", ":")).encode("ascii")
        except (ApiError, AstunerError) as e:
            error = from_exception(e)
        except Exception as e:
            error = unexpected(e)
        holder.tuner.leave_out(made)  # nobody gets to see them
        return error

    return produce()


class Pending(Protocol):
    """What a request waits for."""

    @property
    def task(self) -> asyncio.Task[Any]: ...

    @property
    def outcome(self) -> Outcome:
        """Once the task is done."""
        ...


async def send(
    request: web.BaseRequest, dialect: Dialect, chat: ChatRequest, job: Pending, request_id: str
) -> web.StreamResponse:
    """Wait for the job and send what comes of it; returns when all is handed to the connection."""
    from aiohttp import web

    stream: web.StreamResponse | None = None
    # A stream begins only when the wait gets long, so that an early error still has its status.
    while not (await asyncio.wait({job.task}, timeout=_QUIET if chat.stream else None))[0]:
        stream = stream or await _begin(request, request_id)
        await stream.write(KEEP_ALIVE)
    outcome = job.outcome
    if isinstance(outcome, ApiError):
        if stream is None:
            return refusal(outcome, dialect, request_id)
        outcome = encode(dialect.error_events(outcome)) + dialect.end
    if chat.stream:
        stream = stream or await _begin(request, request_id)
        await stream.write(outcome)
        await stream.write_eof()
        return stream
    response = web.Response(body=outcome, content_type="application/json", headers=_headers(request_id))
    # Sent here and not by aiohttp, so that a connection that breaks meanwhile is noticed as such.
    await response.prepare(request)
    await response.write_eof()
    return response


async def _begin(request: web.BaseRequest, request_id: str) -> web.StreamResponse:
    from aiohttp import web

    headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", **_headers(request_id)}
    stream = web.StreamResponse(headers=headers)
    await stream.prepare(request)
    return stream


async def read_body(request: web.BaseRequest) -> bytes:
    """The body as it came.

    :raises ApiError: it is compressed, too long, or does not come.
    """
    from aiohttp import web

    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.strip().lower() not in ("", "identity"):
        raise ApiError(
            415,
            f"the body has Content-Encoding {encoding[:40]!r}; send it as it is, without",
            code="unsupported_encoding",
        )
    try:
        return await asyncio.wait_for(request.read(), _BODY_TIMEOUT)
    except (web.RequestPayloadError, web.HTTPBadRequest) as e:
        raise ApiError(400, f"the request's body cannot be read: {e}", code="incomplete") from None
    except web.HTTPRequestEntityTooLarge:
        raise ApiError(413, f"the request has more than {MAX_BYTES >> 20} MiB", code="request_too_large") from None
    except asyncio.TimeoutError:
        raise ApiError(400, f"the request's body did not come within {_BODY_TIMEOUT:g} s", code="incomplete") from None


def _headers(request_id: str) -> dict[str, str]:
    return {"x-request-id": request_id, "request-id": request_id}


def json_answer(body: dict[str, Any], request_id: str, status: int = 200) -> web.Response:
    from aiohttp import web

    text = json.dumps(body)
    return web.Response(text=text, status=status, content_type="application/json", headers=_headers(request_id))


def refusal(error: ApiError, dialect: Dialect, request_id: str) -> web.Response:
    """The answer that says what is wrong; whether the same request may fare better later is in its headers."""
    response = json_answer(dialect.error(error), request_id, error.status)
    response.headers["x-should-retry"] = "false" if error.retry_after is None else "true"
    if error.retry_after is not None:
        response.headers["Retry-After"] = str(error.retry_after)
    return response


def _dialect_of(request: web.BaseRequest) -> Dialect:
    """Whose errors a client expects on the routes that are nobody's."""
    return anthropic_messages.DIALECT if "anthropic-version" in request.headers else openai_chat.DIALECT


def _models(name: str) -> dict[str, Any]:
    """The list in both APIs' shapes at once."""
    return {"object": "list", "data": [_model(name)], "has_more": False, "first_id": name, "last_id": name}


def _model(name: str) -> dict[str, Any]:
    """A model by whatever name a client gives it, since requests may use any."""
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "astuner",
        "type": "model",
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
    }
