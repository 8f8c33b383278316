"""The front of every HTTP application of ours: who is let in, how a body is read, how a failure is told, how it lives.

An application is a `Gate` with its routes; aiohttp's low-level server carries it (what others would cost a call is in
``benchmarks/call_overhead.md``).  Invariant: every request ends in one answer with an id, and none but that to ``GET
/health`` or a refusal is given before its key was found valid.
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
"""Bytes of a body, unless the application says otherwise; to parse more holds Python's lock for more than 0.1 s."""
BODY_TIMEOUT = 60.0
IDLE = 75.0
"""Seconds that a connection may stand without a whole request, before the first and between two."""
_LONG = 32 << 10
"""Bytes of a body that is read in a thread of its own, so that the others' requests go on meanwhile."""


class Gate(ABC):
    """Answers all requests of one server.

    :param host: where the server listens; if only this machine can reach that, the Host header must say so too, or else
        a web page could reach it under a name of its own (DNS rebinding).
    """

    what = "server"
    """What it is, for a refusal."""
    most_bytes = MAX_BYTES

    def __init__(self, host: str) -> None:
        self._host, self._is_local = host.lower(), is_loopback(host)

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        request_id = new_request_id()
        try:
            if self._is_local and not is_own_name(request.headers.get("Host", ""), self._host):
                known = "localhost or a loopback address such as 127.0.0.1"
                raise ApiError(403, f"this {self.what} is for this machine, under the name {known}", code="wrong_host")
            if request.path == HEALTH and request.method in ("GET", "HEAD"):
                return json_answer({"status": "ok"}, request_id)
            return await self.reply(request, request_id)
        except Exception as e:
            return self.refuse(self.error_of(e), request, request_id)

    @abstractmethod
    async def reply(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        """The answer; what it raises is told by `refuse`. It has to look at the key."""

    def error_of(self, error: Exception) -> ApiError:
        """What a client is told of what `reply` raised."""
        if isinstance(error, (ConnectionResetError, asyncio.IncompleteReadError)):
            return ApiError(400, "the connection is lost")  # nobody reads it
        return from_exception(error)

    def refuse(self, error: ApiError, request: web.BaseRequest, request_id: str) -> web.Response:
        """The answer to what failed, also to what is no HTTP request that can be read."""
        return refusal(error, error.openai(), request_id)


def new_request_id() -> str:
    return f"req_{secrets.token_hex(12)}"


def check_key(request: web.BaseRequest, key: str, where: str) -> None:
    """
    :param where: the end of the refusal: which key this is, and where to find it.
    :raises ApiError: 401, the request does not bring the key.
    """
    if not has_key(request.headers, key):
        raise ApiError(401, f"this is not {where}", code="invalid_api_key")


def not_found(request: web.BaseRequest, routes: Iterable[str]) -> ApiError:
    there = ", ".join(routes)
    return ApiError(404, f"there is no {request.method} {request.path[:200]}; there are {there}", code="not_found")


def json_answer(body: Mapping[str, Any], request_id: str, status: int = 200) -> web.Response:
    from aiohttp import web

    text = json.dumps(body)
    return web.Response(text=text, status=status, content_type="application/json", headers=id_headers(request_id))


def id_headers(request_id: str) -> dict[str, str]:
    """In OpenAI's and in Anthropic's word."""
    return {"x-request-id": request_id, "request-id": request_id}


def refusal(error: ApiError, body: Mapping[str, Any], request_id: str) -> web.Response:
    """The answer that says what is wrong; whether the same request may fare better later is in its headers."""
    response = json_answer(body, request_id, error.status)
    response.headers["x-should-retry"] = "false" if error.retry_after is None else "true"
    if error.retry_after is not None:
        response.headers["Retry-After"] = str(error.retry_after)
    return response


async def read_body(request: web.BaseRequest, *encodings: str) -> bytes:
    """The body as it came.

    :param encodings: the values of Content-Encoding that the application undoes by itself.
    :raises ApiError: it is compressed in another way, too long, or does not come.
    """
    from aiohttp import web

    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("", "identity", *encodings):
        instead = f"with {' or '.join(encodings)} or without" if encodings else "as it is, without"
        what = f"the body has Content-Encoding {encoding[:40]!r}; send it {instead}"
        raise ApiError(415, what, code="unsupported_encoding")
    try:
        is_here = request.content.is_eof()  # mostly; waiting costs a task
        return await (request.read() if is_here else asyncio.wait_for(request.read(), BODY_TIMEOUT))
    except web.HTTPRequestEntityTooLarge:
        most = request.client_max_size >> 20
        raise ApiError(413, f"the request has more than {most} MiB", code="request_too_large") from None
    except (web.RequestPayloadError, web.HTTPBadRequest, ConnectionResetError) as e:
        raise ApiError(400, f"the request's body cannot be read: {e}", code="incomplete") from None
    except asyncio.TimeoutError:
        raise ApiError(400, f"the request's body did not come within {BODY_TIMEOUT:g} s", code="incomplete") from None


def parse(raw: bytes) -> dict[str, Any]:
    """The JSON object in ``raw``, which can be written as JSON and encoded again (see `astuner_http.strict_json`).

    :raises ApiError: 400, there is none.
    """
    try:
        return parse_json(raw)
    except ValueError as e:
        raise ApiError(400, f"the request's body cannot be read as JSON: {e}", code="invalid_json") from None


async def worked_on(raw: bytes, work: Callable[[bytes], T]) -> T:
    """``work(raw)``, beside the event loop where the body is long."""
    return await in_daemon_thread(work, raw) if len(raw) > _LONG else work(raw)


# ---- life ------------------------------------------------------------------------------------------------------------


def make_server(gate: Gate) -> web.Server:
    """An aiohttp server that takes long bodies, cancels handlers whose client is gone, and logs no keys."""
    from aiohttp import web

    loop = asyncio.get_running_loop()
    logger = quiet_http_logger("astuner.endpoint.http")

    def make_request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
        protocol.begun_body = payload
        return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=gate.most_bytes)

    class Protocol(web.RequestHandler):
        """Answers in JSON what aiohttp refuses before a handler sees it, and clients that stop sending."""

        half_closed = False
        """The client has stopped sending, and its request is answered all the same."""
        answered = False
        """The answer is on its way to a client that has stopped sending."""
        begun_body: Any = None
        """The body of the newest request that is or was handled."""

        def eof_received(self) -> bool | None:  # type: ignore[override]  # aiohttp's own returns nothing
            """Keep the connection while a request is answered that came as a whole; else it is closed."""
            connection = None if self.transport is None else self.transport.get_extra_info("socket")
            newest_body = self._messages[-1][1] if self._messages else self.begun_body
            if not CAN_TELL or connection is None or self._is_idle() or newest_body is None or not newest_body.is_eof():
                return None
            if is_gone(connection):
                return None
            self.half_closed = True
            self._close = not self._messages  # nothing follows the answer that is under way
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
            super().handle_error(request, status, exc, message)  # logs it, and raises where an answer has begun
            error = ApiError(status, "this is no HTTP request that can be read", code="malformed_request")
            response = gate.refuse(error, request, new_request_id())
            response.force_close()
            return response

    class Server(web.Server):
        def __call__(self) -> web.RequestHandler:
            # Bodies stay as they came: a compressed one is refused, and none unfolds before its key was looked at.
            none: Any = None  # allowed, whatever its type says
            return Protocol(
                self, loop=loop, access_log=none, logger=logger, auto_decompress=False, keepalive_timeout=IDLE
            )

    return Server(gate, request_factory=make_request, handler_cancellation=True)


@asynccontextmanager
async def running(gate: Gate, listening: socket.socket, *, grace: float) -> AsyncIterator[None]:
    """The application answers on a socket for as long as the block runs; after it, nothing of it runs any more.

    :param grace: seconds that answers under way may take at the end.
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
    """Call ``then`` when the other end of a pipe is gone; what comes through it is thrown away."""
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
    """Answer until the process is told to end, by Ctrl-C or SIGTERM; a second one ends it at once.

    :param ready: called once it answers.
    :param over: ends it as well.
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
