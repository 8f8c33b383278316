"""A small JSON client for ASTuner's own requests: urllib3 with a deadline and a size limit for the answer.

A vendor's client would add its own retry policy, and version conflicts with agent frameworks. Redirects are not
followed, because they would send the key to another host. Invariants: the key is only in the ``Authorization`` header,
never in a message; a request that the server may have executed is not repeated, unless it only reads.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

import urllib3
from urllib3.exceptions import HTTPError, ProtocolError

from astuner.contracts.errors import AstunerError
from astuner.contracts.secrets import without_values

MAX_REPLY = 1 << 20
_EXCERPT = 500
_MAX_REFUSAL = 1 << 16
_MAY_PASS = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_LOOPBACK = re.compile(r"localhost|127(\.\d+){3}|::1")
_MOST_IDLE = 1024
"""Maximum number of idle connections."""


class HttpError(AstunerError):
    """A request without a usable answer.

    `again` tells whether a retry may help, and `after` is the number of seconds to wait before it.
    """

    def __init__(
        self,
        message: str,
        *,
        again: bool,
        after: float = 0.0,
        status: int | None = None,
        refusal: Any = None,
        unsent: bool = False,
    ) -> None:
        super().__init__(message)
        self.again = again
        self.after = after
        self.status = status
        self.refusal = refusal
        """JSON body of a refusal, if there is one. It may contain the key."""
        self.unsent = unsent
        """Whether the server cannot have received the request: the connection failed."""


_WAITED_AT: ContextVar[list[socket.socket | None]] = ContextVar("waited_at")
"""Sockets that wait for an answer; contains None after cancellation. Each list operation used here is atomic."""


@contextmanager
def given_up_when_cancelled() -> Iterator[None]:
    """Close the connection of a waiting request when the block is cancelled, so that the server notices.

    The request may run in a thread with this context.
    """
    places: list[socket.socket | None] = []
    token = _WAITED_AT.set(places)
    try:
        yield
    except asyncio.CancelledError:
        places.append(None)
        for place in filter(None, tuple(places)):
            with suppress(OSError):  # already closed by the server
                socket.socket.shutdown(place, socket.SHUT_RDWR)  # wakes the waiting thread
        raise
    finally:
        _WAITED_AT.reset(token)


class _GivenUp:
    def getresponse(self) -> Any:
        places, place = _WAITED_AT.get([]), self.sock  # type: ignore[attr-defined]
        places.append(place)
        answer = None if None in places else super().getresponse()  # type: ignore[misc]
        places.remove(place)
        if None in places:  # the connection may be shut down and must not be reused
            raise ProtocolError("the request was cancelled")
        return answer


class _Http(urllib3.HTTPConnectionPool):
    ConnectionCls = type("_HttpConnection", (_GivenUp, urllib3.connection.HTTPConnection), {})


class _Https(urllib3.HTTPSConnectionPool):
    ConnectionCls = type("_HttpsConnection", (_GivenUp, urllib3.connection.HTTPSConnection), {})


class JsonClient:
    """Client of one server, with or without a key. Requests block. Thread-safe."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str = "",
        key_name: str = "the API key",
        timeout: float,
        max_reply: int = MAX_REPLY,
    ) -> None:
        """Create a client.

        :param base_url: Prefix of all routes, for example ``http://127.0.0.1:8000/v1``.
        :param key_name: Name of the key in messages, for example the variable that contains it.
        :param timeout: Seconds for each wait, and for reading the complete answer.
        :param max_reply: Maximum size of an answer in bytes.
        :raises HttpError: The URL or the key is invalid.
        """
        try:
            parts = urlsplit(base_url)
            host, _ = parts.hostname, parts.port
        except ValueError:  # its message may contain a part of a password
            raise HttpError("the server's address is not a valid URL", again=False) from None
        if "@" in (parts.netloc or base_url):
            raise HttpError(
                "the server's URL contains a user or password. Remove it, and pass the key in its variable",
                again=False,
            )
        if parts.scheme not in ("http", "https") or not host:
            raise HttpError(f"{base_url!r} is not a valid URL; example: http://127.0.0.1:8000/v1", again=False)
        if not (api_key.isascii() and api_key.isprintable()):
            raise HttpError(f"{key_name} has characters that are not allowed in an HTTP header", again=False)
        self.base_url = base_url.rstrip("/")
        self._key = api_key
        self._timeout = timeout
        self._max_reply = max_reply
        try:
            self._connect()
        except (ValueError, HTTPError):  # its message may contain a password
            raise HttpError(
                f"cannot reach {self.base_url}: the variable {parts.scheme}_proxy is not a valid proxy URL", again=False
            ) from None

    def _connect(self) -> None:
        """Create this process's connections, through the proxy in the environment unless the server is local."""
        self._process = os.getpid()
        parts = urlsplit(self.base_url)
        bypassed = _LOOPBACK.fullmatch(parts.hostname or "") or proxy_bypass(parts.netloc)
        proxy = None if bypassed else getproxies().get(parts.scheme)
        self._connections = urllib3.PoolManager(maxsize=_MOST_IDLE)
        if proxy:
            url = urllib3.util.parse_url(proxy if "://" in proxy else f"http://{proxy}")
            login = urllib3.make_headers(proxy_basic_auth=unquote(url.auth)) if url.auth else None
            to = url._replace(auth=None).url
            self._connections = urllib3.ProxyManager(to, proxy_headers=login, maxsize=_MOST_IDLE)
        self._connections.pool_classes_by_scheme = {"http": _Http, "https": _Https}

    def close(self) -> None:
        """Close idle connections. Later requests still work."""
        self._connections.clear()

    def get(self, route: str) -> Any:
        """Return the JSON document at ``base_url + route``; raises as `post`."""
        return self._ask(route, None)

    def post(self, route: str, body: Any) -> Any:
        """Send ``body`` as JSON to ``base_url + route`` and return the JSON document of the answer.

        :raises HttpError: There is no usable answer; the message has the URL and the reason.
        """
        return self._ask(route, json.dumps(body).encode())

    def is_up(self, route: str) -> bool:
        """Return whether ``base_url + route`` answers with a success status."""
        try:
            self._fetch(route, None)
        except HttpError:
            return False
        return True

    def _ask(self, route: str, data: bytes | None) -> Any:
        body = self._fetch(route, data)
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as e:
            raise HttpError(
                f"{self.base_url}{route} did not answer with JSON ({type(e).__name__})", again=True
            ) from None

    def _fetch(self, route: str, data: bytes | None) -> bytes:
        url = self.base_url + route
        if self._process != os.getpid():  # after a fork the connections belong to the parent
            self._connect()
        try:
            try:
                return self._exchange(url, data)
            except ProtocolError:  # the server may have closed an idle connection
                if data is not None:
                    raise
                return self._exchange(url, data)
        except HTTPError as e:
            cause = _cause(e)
            if isinstance(cause, (TimeoutError, urllib3.exceptions.TimeoutError)):
                raise HttpError(f"{url} gave no answer within {self._timeout:g} s", again=True) from None
            text = f"cannot reach {url}: {type(cause).__name__}: {cause}"
            unsent = isinstance(cause, (ConnectionRefusedError, socket.gaierror))
            raise HttpError(self._without_key(text), again=True, unsent=unsent) from None

    def _exchange(self, url: str, data: bytes | None) -> bytes:
        """Send one request and return the body of its answer."""
        headers = {"Accept": "application/json", "User-Agent": "astuner"}
        if data is not None:
            headers["Content-Type"] = "application/json"
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        deadline = time.monotonic() + self._timeout
        response = self._connections.request(
            "GET" if data is None else "POST",
            url,
            body=data,
            headers=headers,
            timeout=self._timeout,
            retries=False,
            redirect=False,
            preload_content=False,
        )
        try:
            if not 200 <= response.status < 300:
                raise self._refused(response, url, deadline)
            body = _read(response, self._max_reply + 1, deadline)
            if len(body) > self._max_reply:
                raise HttpError(f"the answer of {url} is longer than {self._max_reply} bytes", again=False)
            return body
        finally:
            response.close()  # also closes its connection, unless everything was read

    def _refused(self, response: urllib3.BaseHTTPResponse, url: str, deadline: float) -> HttpError:
        try:
            # Read more than is shown, so that a key is not cut in two and missed.
            body = _read(response, _MAX_REFUSAL + len(self._key), deadline)
        except HTTPError:
            body = b""
        excerpt = self._without_key(body.decode("utf-8", "replace"))[:_EXCERPT].strip()
        after = response.headers.get("Retry-After", "").strip()
        return HttpError(
            f"{url} answered {response.status} {self._without_key(response.reason or '')}: {excerpt or 'no text'}",
            again=response.status in _MAY_PASS,
            after=float(after) if after.isdigit() else 0.0,  # the date format (RFC 9110, 10.2.3) is ignored
            status=response.status,
            refusal=_json_or_none(body),
        )

    def _without_key(self, text: str) -> str:
        return without_values(text.replace(self._key, "***"), [self._key], "***") if self._key else text


def _read(response: urllib3.BaseHTTPResponse, most: int, deadline: float) -> bytes:
    """Return the body, up to ``most`` bytes; a completely read body releases its connection.

    :raises urllib3.exceptions.ReadTimeoutError: The body was not complete at the deadline.
    """
    parts: list[bytes] = []
    while most > 0 and (chunk := response.read1(min(most, 65536), decode_content=False)):
        parts.append(chunk)
        most -= len(chunk)
        if time.monotonic() > deadline:
            raise urllib3.exceptions.ReadTimeoutError(None, None, "too slow")  # type: ignore[arg-type]
    if response.length_remaining == 0:
        response.release_conn()
    return b"".join(parts)


def _cause(e: BaseException) -> BaseException:
    """Return the cause inside urllib3's wrapping exceptions."""
    inner = e.__cause__ or (e.args[-1] if e.args else None)
    return _cause(inner) if isinstance(inner, Exception) else e


def _json_or_none(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None
