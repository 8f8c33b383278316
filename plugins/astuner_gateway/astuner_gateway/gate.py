"""Provide the common base of ASTuner's HTTP applications: access, request bodies, error answers and lifecycle.

An application is a `Gate` with its routes, run by aiohttp's low-level server (see ``benchmarks/call_overhead.md`` for
the cost of alternatives). Invariant: every request gets one answer with an ID. Without a valid key, the answer is an
error, except on ``GET /health``.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from astuner import in_daemon_thread
from astuner_gateway.endpoint.errors import ApiError, from_exception
from astuner_gateway.half_closed import CAN_TELL, LOOK_SECONDS, is_gone, probe
from astuner_gateway.listening import BACKLOG, has_key, is_loopback, is_own_name, quiet_http_logger
from astuner_http.strict_json import parse_json

if TYPE_CHECKING:
    from aiohttp import web

T = TypeVar("T")

HEALTH = "/health"
MAX_BYTES = 16 << 20
"""Default maximum bytes of a body; parsing more would hold Python's lock for more than 0.1 s."""
BODY_TIMEOUT = 60.0
IDLE = 75.0
"""Seconds that a connection may stay open without a complete request."""
_LONG = 32 << 10
"""Bytes above which a body is read in a separate thread, so that other requests continue."""


class Gate(ABC):
    """Answer all requests of one server.

    :param host: Address of the server. If only this machine can reach it, the Host header must name this machine too;
        otherwise a web page could reach the server under its own name (DNS rebinding).
    """

    what = "server"
    """Name of the server in error messages."""
    most_bytes = MAX_BYTES

    def __init__(self, host: str) -> None:
        self._host, self._is_local = host.lower(), is_loopback(host)

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        request_id = new_request_id()
        try:
            if self._is_local and not is_own_name(request.headers.get("Host", ""), self._host):
                known = "localhost or a loopback address such as 127.0.0.1"
                raise ApiError(403, f"this {self.what} is local. Call it as {known}", code="wrong_host")
            if request.path == HEALTH and request.method in ("GET", "HEAD"):
                return json_answer({"status": "ok"}, request_id)
            return await self.reply(request, request_id)
        except Exception as e:
            return self.refuse(self.error_of(e), request, request_id)

    @abstractmethod
    async def reply(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        """Return the answer after checking the key; `refuse` answers exceptions."""

    def error_of(self, error: Exception) -> ApiError:
        """Return the error that a client receives for an exception of `reply`."""
        if isinstance(error, (ConnectionResetError, asyncio.IncompleteReadError)):
            return ApiError(400, "the connection is lost")  # no client reads this
        return from_exception(error)

    def refuse(self, error: ApiError, request: web.BaseRequest, request_id: str) -> web.Response:
        """Return the answer to a failed request, including requests that are not valid HTTP."""
        return refusal(error, error.openai(), request_id)


def new_request_id() -> str:
    """Return an unguessable ID for a request."""
    return f"req_{secrets.token_hex(12)}"


def check_key(request: web.BaseRequest, key: str, where: str) -> None:
    """Check that a request contains the key.

    :param where: End of the message: name of the key and where to find it.
    :raises ApiError: 401, the request does not contain the key.
    """
    if not has_key(request.headers, key):
        raise ApiError(401, f"this is not {where}", code="invalid_api_key")


def not_found(request: web.BaseRequest, routes: Iterable[str]) -> ApiError:
    """Return a 404 error that lists the available routes."""
    there = ", ".join(routes)
    return ApiError(
        404, f"{request.method} {request.path[:200]} does not exist. Available routes: {there}", code="not_found"
    )


def json_answer(body: Mapping[str, Any], request_id: str, status: int = 200) -> web.Response:
    """Return a JSON answer with its request ID."""
    from aiohttp import web

    text = json.dumps(body)
    return web.Response(text=text, status=status, content_type="application/json", headers=id_headers(request_id))


def id_headers(request_id: str) -> dict[str, str]:
    """Return the headers with the request ID that OpenAI and Anthropic use."""
    return {"x-request-id": request_id, "request-id": request_id}


def refusal(error: ApiError, body: Mapping[str, Any], request_id: str) -> web.Response:
    """Return an error answer, whose headers state whether a retry may succeed."""
    response = json_answer(body, request_id, error.status)
    response.headers["x-should-retry"] = "false" if error.retry_after is None else "true"
    if error.retry_after is not None:
        response.headers["Retry-After"] = str(error.retry_after)
    return response


async def read_body(request: web.BaseRequest, *encodings: str) -> bytes:
    """Return the bytes of the body.

    :param encodings: Values of Content-Encoding that the application decodes itself.
    :raises ApiError: The body has another encoding, is too long or does not arrive.
    """
    from aiohttp import web

    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("", "identity", *encodings):
        instead = f"with {' or '.join(encodings)}, or uncompressed" if encodings else "uncompressed"
        what = f"the body has Content-Encoding {encoding[:40]!r}. Send it {instead}"
        raise ApiError(415, what, code="unsupported_encoding")
    try:
        is_here = request.content.is_eof()  # usually true; waiting costs a task
        return await (request.read() if is_here else asyncio.wait_for(request.read(), BODY_TIMEOUT))
    except web.HTTPRequestEntityTooLarge:
        most = request.client_max_size >> 20
        raise ApiError(413, f"the request body exceeds {most} MiB", code="request_too_large") from None
    except (web.RequestPayloadError, web.HTTPBadRequest, ConnectionResetError) as e:
        raise ApiError(400, f"the request body cannot be read: {e}", code="incomplete") from None
    except asyncio.TimeoutError:
        raise ApiError(400, f"the request body did not arrive within {BODY_TIMEOUT:g} s", code="incomplete") from None


def parse(raw: bytes) -> dict[str, Any]:
    """Return the JSON object in ``raw``, which can be written as JSON again (see `astuner_http.strict_json`).

    :raises ApiError: 400, the body is not a JSON object.
    """
    try:
        return parse_json(raw)
    except ValueError as e:
        raise ApiError(400, f"the request body is not valid JSON: {e}", code="invalid_json") from None


async def worked_on(raw: bytes, work: Callable[[bytes], T]) -> T:
    """Return ``work(raw)``, computed outside of the event loop if the body is long."""
    return await in_daemon_thread(work, raw) if len(raw) > _LONG else work(raw)


# ---- lifecycle -------------------------------------------------------------------------------------------------------


def make_server(gate: Gate) -> web.Server:
    """Return an aiohttp server that accepts long bodies, cancels handlers of disconnected clients and logs no keys."""
    from aiohttp import web

    loop = asyncio.get_running_loop()
    logger = quiet_http_logger("astuner.endpoint.http")

    def make_request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
        protocol.begun_body = payload
        return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=gate.most_bytes)

    class Protocol(web.RequestHandler):
        """Answer in JSON what aiohttp rejects before a handler runs, and serve clients that stop sending."""

        half_closed = False
        """Whether the client has stopped sending while its request is still answered."""
        answered = False
        """Whether the answer is being sent to a client that has stopped sending."""
        begun_body: Any = None
        """Body of the newest handled request."""

        def eof_received(self) -> bool | None:  # type: ignore[override]  # aiohttp's own returns nothing
            """Keep the connection open while a complete request is answered; otherwise close it."""
            connection = None if self.transport is None else self.transport.get_extra_info("socket")
            newest_body = self._messages[-1][1] if self._messages else self.begun_body
            if not CAN_TELL or connection is None or self._is_idle() or newest_body is None or not newest_body.is_eof():
                return None
            if is_gone(connection):
                return None
            self.half_closed = True
            self._close = not self._messages  # nothing follows the current answer
            probe(connection)
            loop.call_later(LOOK_SECONDS, self._look)
            return True

        def _is_idle(self) -> bool:
            return self._waiter is not None and not self._waiter.done()

        def _look(self) -> None:
            if self.transport is None:
                return
            if self._is_idle():
                self.transport.close()
            elif not self.answered and is_gone(self.transport.get_extra_info("socket")):
                self.transport.abort()  # cancels the handler
            else:
                loop.call_later(LOOK_SECONDS, self._look)

        def handle_error(self, request: Any, status: int = 500, exc: Any = None, message: Any = None) -> Any:
            super().handle_error(request, status, exc, message)  # logs it, and raises if an answer has started
            error = ApiError(status, "this is not a valid HTTP request", code="malformed_request")
            response = gate.refuse(error, request, new_request_id())
            response.force_close()
            return response

    class Server(web.Server):
        def __call__(self) -> web.RequestHandler:
            # Bodies stay compressed: none is decompressed before its key is checked.
            none: Any = None  # allowed despite its type
            return Protocol(
                self, loop=loop, access_log=none, logger=logger, auto_decompress=False, keepalive_timeout=IDLE
            )

    return Server(gate, request_factory=make_request, handler_cancellation=True)


@asynccontextmanager
async def running(gate: Gate, listening: socket.socket, *, grace: float) -> AsyncIterator[None]:
    """Serve on a socket for as long as the block runs; afterwards, nothing of the application runs anymore.

    :param grace: Seconds for running answers at the end.
    """
    from aiohttp import web

    runner = web.ServerRunner(make_server(gate), shutdown_timeout=grace)
    await runner.setup()
    try:
        await web.SockSite(runner, listening, backlog=BACKLOG).start()
        yield
    finally:
        await runner.cleanup()


def when_closed(descriptor: int, then: Callable[[], None]) -> None:
    """Call ``then`` when the other end of a pipe is closed; its data is discarded."""
    loop = asyncio.get_running_loop()

    def look() -> None:
        if not os.read(descriptor, 4096):
            loop.remove_reader(descriptor)
            then()

    loop.add_reader(descriptor, look)


async def serve_until_told(
    gate: Gate,
    listening: socket.socket,
    ready: Callable[[], None],
    *,
    grace: float = 5.0,
    over: asyncio.Event | None = None,
) -> None:
    """Serve until Ctrl-C or SIGTERM; a second signal ends the process immediately.

    :param ready: Called as soon as the server answers.
    :param over: Event that also stops the server.
    """
    loop, ended = asyncio.get_running_loop(), over or asyncio.Event()

    def end() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        ended.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end)
    async with running(gate, listening, grace=grace):
        ready()
        await ended.wait()
