"""JSON over HTTP, for the few requests ASTuner makes itself: urllib3 with a deadline over the answer and a bound on it.

A client of a vendor's would bring a retry policy of its own and version conflicts with agent frameworks.  Redirects are
not followed, since they would carry the key to another host.  Invariant: the key is in the ``Authorization`` header and
nowhere else, so in no message; a request that a server may have carried out is not made a second time, unless it only
reads.
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
"""Connections that may wait for the next request; they are as many as there were requests at a time."""


class HttpError(AstunerError):
    """There is no answer; `again` says whether asking once more may help, `after` from when (seconds)."""

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
        """What a server that refused said, where that is JSON; it may repeat the key."""
        self.unsent = unsent
        """Whether the server cannot have seen the request: nobody took the connection."""


_WAITED_AT: ContextVar[list[socket.socket | None]] = ContextVar("waited_at")
"""Where an answer is waited for; None among them: nobody wants it. What a list is asked here, it does in one go."""


@contextmanager
def given_up_when_cancelled() -> Iterator[None]:
    """Where the block is cancelled while a thread that has its context waits for an answer, the connection is closed,
    so that the server sees that nobody waits.
    """
    places: list[socket.socket | None] = []
    token = _WAITED_AT.set(places)
    try:
        yield
    except asyncio.CancelledError:
        places.append(None)
        for place in filter(None, tuple(places)):
            with suppress(OSError):  # the server has closed it
                socket.socket.shutdown(place, socket.SHUT_RDWR)  # wakes who waits there
        raise
    finally:
        _WAITED_AT.reset(token)


class _GivenUp:
    def getresponse(self) -> Any:
        places, place = _WAITED_AT.get([]), self.sock  # type: ignore[attr-defined]
        places.append(place)
        answer = None if None in places else super().getresponse()  # type: ignore[misc]
        places.remove(place)
        if None in places:  # its connection may be shut down, and must not be used again
            raise ProtocolError("nobody waits for the answer")
        return answer


class _Http(urllib3.HTTPConnectionPool):
    ConnectionCls = type("_HttpConnection", (_GivenUp, urllib3.connection.HTTPConnection), {})


class _Https(urllib3.HTTPSConnectionPool):
    ConnectionCls = type("_HttpsConnection", (_GivenUp, urllib3.connection.HTTPSConnection), {})


class JsonClient:
    """One server, with or without a key. Requests block and may be made from several threads."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str = "",
        key_name: str = "the API key",
        timeout: float,
        max_reply: int = MAX_REPLY,
    ) -> None:
        """
        :param base_url: what all routes start with, e.g. ``http://127.0.0.1:8000/v1``.
        :param key_name: what messages call the key, e.g. the variable it was read from.
        :param timeout: seconds that one wait for the server, and the reading of its whole answer, may take.
        :param max_reply: longest answer in bytes.
        :raises HttpError: the URL or the key cannot be used.
        """
        try:
            parts = urlsplit(base_url)
            host, _ = parts.hostname, parts.port
        except ValueError:  # whose text may quote a part of a password
            raise HttpError("the server's address is no URL", again=False) from None
        if "@" in (parts.netloc or base_url):
            raise HttpError(
                "the server's URL has a user or password in it; leave it out, and give the key by its variable",
                again=False,
            )
        if parts.scheme not in ("http", "https") or not host:
            raise HttpError(f"{base_url!r} is no URL; write for example http://127.0.0.1:8000/v1", again=False)
        if not (api_key.isascii() and api_key.isprintable()):
            raise HttpError(f"{key_name} has characters that no HTTP header may have", again=False)
        self.base_url = base_url.rstrip("/")
        self._key = api_key
        self._timeout = timeout
        self._max_reply = max_reply
        try:
            self._connect()
        except (ValueError, HTTPError):  # it may have a password
            raise HttpError(
                f"cannot reach {self.base_url}: the variable {parts.scheme}_proxy is no URL of a proxy", again=False
            ) from None

    def _connect(self) -> None:
        """Connections of this process; through the proxy that the environment names, but not within this machine."""
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
        """Give back the connections that wait for the next request; a later one still works."""
        self._connections.clear()

    def get(self, route: str) -> Any:
        """The JSON document at ``base_url + route``; raises as `post`."""
        return self._ask(route, None)

    def post(self, route: str, body: Any) -> Any:
        """Send ``body`` as JSON to ``base_url + route``; the JSON document that comes back.

        :raises HttpError: none came back; the message names the URL and what happened.
        """
        return self._ask(route, json.dumps(body).encode())

    def is_up(self, route: str) -> bool:
        """Whether ``base_url + route`` answers with success, whatever it says."""
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
        if self._process != os.getpid():  # a fork: the connections are its parent's
            self._connect()
        try:
            try:
                return self._exchange(url, data)
            except ProtocolError:  # the server may have closed a connection that was used before
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
        """One request and its answer."""
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
            response.close()  # its connection too, unless all of it was read

    def _refused(self, response: urllib3.BaseHTTPResponse, url: str, deadline: float) -> HttpError:
        try:
            # More than is shown is read, so that no key is cut in two and then not recognised.
            body = _read(response, _MAX_REFUSAL + len(self._key), deadline)
        except HTTPError:
            body = b""
        excerpt = self._without_key(body.decode("utf-8", "replace"))[:_EXCERPT].strip()
        after = response.headers.get("Retry-After", "").strip()
        return HttpError(
            f"{url} answered {response.status} {self._without_key(response.reason or '')}: {excerpt or 'no text'}",
            again=response.status in _MAY_PASS,
            after=float(after) if after.isdigit() else 0.0,  # the form with a date is not waited for (RFC 9110, 10.2.3)
            status=response.status,
            refusal=_json_or_none(body),
        )

    def _without_key(self, text: str) -> str:
        return without_values(text.replace(self._key, "***"), [self._key], "***") if self._key else text


def _read(response: urllib3.BaseHTTPResponse, most: int, deadline: float) -> bytes:
    """The body up to ``most`` bytes; its connection is given back if that was all.

    :raises urllib3.exceptions.ReadTimeoutError: it drips in past the deadline.
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
    """What went wrong, below what urllib3 wraps around it."""
    inner = e.__cause__ or (e.args[-1] if e.args else None)
    return _cause(inner) if isinstance(inner, Exception) else e


def _json_or_none(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None
