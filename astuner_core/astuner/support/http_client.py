"""JSON over HTTP, for the few requests ASTuner makes itself, by the standard library.

`http.client` rather than a package: these are single requests with small answers, and a client of a vendor's would
bring a retry policy of its own and version conflicts with agent frameworks.  What it lacks is added here: connections
that are used again, a deadline over the answer, and a bound on its size; redirects are not followed, since they would
carry the key to another host.  Invariant: the key is in the ``Authorization`` header and nowhere else, so in no
message; a request that a server may have carried out is not made a second time, unless it only reads.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
import urllib.parse
import weakref
from typing import Any

from astuner.contracts.errors import AstunerError
from astuner.support.http_connections import Connections

MAX_REPLY = 1 << 20
_EXCERPT = 500
_MAX_REFUSAL = 1 << 16
_MAY_PASS = frozenset({408, 409, 425, 429, 500, 502, 503, 504})


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
            parts = urllib.parse.urlsplit(base_url)
            host, _ = parts.hostname, parts.port
        except ValueError as e:
            raise HttpError(f"the server's address is no URL: {e}", again=False) from None
        if "@" in (parts.netloc or base_url):  # urllib would take a user for a part of the host, and print it
            raise HttpError(
                "the server's URL has a user or password in it; leave it out, and give the key by its variable",
                again=False,
            )
        if parts.scheme not in ("http", "https") or not host:
            raise HttpError(f"{base_url!r} is no URL; write for example http://127.0.0.1:8000/v1", again=False)
        if not (api_key.isascii() and api_key.isprintable()):  # http.client would refuse it and print it
            raise HttpError(f"{key_name} has characters that no HTTP header may have", again=False)
        self.base_url = base_url.rstrip("/")
        self._key = api_key
        self._timeout = timeout
        self._max_reply = max_reply
        try:
            self._connections = Connections(parts, timeout)
        except ValueError as e:
            raise HttpError(f"cannot reach {self.base_url}: {e}", again=False) from None
        self._path = urllib.parse.urlunsplit(("", "", parts.path, parts.query, "")).rstrip("/")
        weakref.finalize(self, self._connections.close)

    def close(self) -> None:
        """Give back the connections that wait for the next request; a later one still works."""
        self._connections.close()

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
        headers = {"Accept": "application/json", "User-Agent": "astuner", **self._connections.headers}
        if data is not None:
            headers["Content-Type"] = "application/json"
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        deadline = time.monotonic() + self._timeout
        target = self._connections.prefix + (self._path + route or "/")
        try:
            return self._exchange(url, target, data, headers, deadline)
        except TimeoutError:
            raise HttpError(f"{url} gave no answer within {self._timeout:g} s", again=True) from None
        except (http.client.HTTPException, OSError, UnicodeError) as e:
            text = f"cannot reach {url}: {type(e).__name__}: {e}"
            unsent = isinstance(e, (ConnectionRefusedError, socket.gaierror))
            raise HttpError(self._without_key(text), again=True, unsent=unsent) from None

    def _exchange(self, url: str, target: str, data: bytes | None, headers: dict[str, str], deadline: float) -> bytes:
        """One request and its answer; once more where a connection that was used before turns out to be closed."""
        while True:
            connection = self._connections.take()
            used, sent, finished = connection.sock is not None, False, False
            try:
                try:
                    connection.request("GET" if data is None else "POST", target, data, headers)
                    sent = True
                    response = connection.getresponse()
                except ConnectionError:  # also where it ends before the answer begins
                    if used and (data is None or not sent):
                        continue
                    raise
                with response:
                    try:
                        return self._body(response, url, deadline)
                    finally:
                        finished = response.isclosed() or response.length == 0
            finally:
                if finished:
                    self._connections.give_back(connection)
                else:
                    connection.close()

    def _body(self, response: http.client.HTTPResponse, url: str, deadline: float) -> bytes:
        if not 200 <= response.status < 300:
            raise self._refused(response, url, deadline)
        body = _read(response, self._max_reply + 1, deadline)
        if len(body) > self._max_reply:
            raise HttpError(f"the answer of {url} is longer than {self._max_reply} bytes", again=False)
        return body

    def _refused(self, response: http.client.HTTPResponse, url: str, deadline: float) -> HttpError:
        try:
            # More than is shown is read, so that no key is cut in two and then not recognised.
            body = _read(response, _MAX_REFUSAL + len(self._key), deadline)
        except (http.client.HTTPException, OSError):
            body = b""
        excerpt = self._without_key(body.decode("utf-8", "replace"))[:_EXCERPT].strip()
        return HttpError(
            f"{url} answered {response.status} {self._without_key(response.reason)}: {excerpt or 'no text'}",
            again=response.status in _MAY_PASS,
            after=_seconds(response.headers.get("Retry-After")),
            status=response.status,
            refusal=_json_or_none(body),
        )

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text


def _read(response: Any, most: int, deadline: float) -> bytes:
    """The body up to ``most`` bytes; `TimeoutError` when it drips in past the deadline."""
    parts: list[bytes] = []
    while most > 0 and (chunk := response.read1(min(most, 65536))):
        parts.append(chunk)
        most -= len(chunk)
        if time.monotonic() > deadline:
            raise TimeoutError
    return b"".join(parts)


def _json_or_none(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _seconds(retry_after: str | None) -> float:
    """The seconds form of a Retry-After header (RFC 9110, 10.2.3); the date form is not waited for."""
    return float(retry_after) if retry_after and retry_after.strip().isdigit() else 0.0
