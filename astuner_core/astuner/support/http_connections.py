"""Connections to one server that are used again, for clients that block.

A connection per request costs both sides about as much as the request itself, and leaves thousands of sockets waiting
in the kernel.  A used one may be closed by the server at any time, so only one that was used a moment ago is taken,
and only when nothing has arrived on it.  Invariant: a connection is in the hands of one thread, of the process that
made it.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import os
import re
import select
import threading
import time
import urllib.parse
import urllib.request

IDLE_SECONDS = 4.0
"""How long a connection is kept unused: less than the five seconds of the servers that wait least."""
MOST_IDLE = 128
_LOOPBACK = re.compile(r"localhost|127(\.\d+){3}|::1")


class Connections:
    """Connections to the server of a URL; through the proxy that the environment names, but not within this machine.

    :param parts: the URL, with a host.
    :param timeout: seconds one wait for the server may take.
    :raises ValueError: its port is none, or the proxy's address is no URL.
    """

    def __init__(self, parts: urllib.parse.SplitResult, timeout: float) -> None:
        self._secure = parts.scheme == "https"
        self._host, self._port = parts.hostname or "", parts.port
        self._timeout = timeout
        self._proxy = _proxy_for(parts)
        self._lock = threading.Lock()
        self._idle: list[tuple[float, http.client.HTTPConnection]] = []  # and since when; the last used one is last
        self._process = os.getpid()
        self._closed = False
        # Plain requests to a proxy name the whole URL, and bring its password along.
        plain = self._proxy is not None and not self._secure
        self.prefix = f"{parts.scheme}://{parts.netloc}" if plain else ""
        """What a request's target starts with."""
        self.headers = _authorization(self._proxy) if plain else {}
        """What every request brings for the proxy."""

    def take(self) -> http.client.HTTPConnection:
        """A connection for the caller alone, which was used before exactly if its ``sock`` is not None."""
        stale = []
        try:
            with self._lock:
                if self._process != os.getpid():  # a fork: they are its parent's
                    self._process, self._idle = os.getpid(), []
                while self._idle:
                    since, connection = self._idle.pop()
                    if time.monotonic() - since < IDLE_SECONDS and _is_quiet(connection):
                        return connection
                    stale.append(connection)
        finally:
            for connection in stale:
                connection.close()
        return self._made()

    def give_back(self, connection: http.client.HTTPConnection) -> None:
        """Keep it for the next request; what came in answer to the last one was read to its end."""
        now = time.monotonic()
        with self._lock:
            kept = not self._closed and self._process == os.getpid() and connection.sock is not None
            if kept:
                self._idle.append((now, connection))
            many = len(self._idle) - MOST_IDLE
            old = [c for n, (since, c) in enumerate(self._idle) if n < many or now - since >= IDLE_SECONDS]
            if old:
                self._idle = self._idle[len(old) :]  # the oldest are first
        for each in old if kept else [*old, connection]:
            each.close()

    def close(self) -> None:
        """Close what is idle; what is in use is closed when it is given back."""
        with self._lock:
            self._closed, idle, self._idle = True, self._idle, []
        for _, connection in idle:
            connection.close()

    def _made(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        if self._proxy is None:
            return kind(self._host, self._port, timeout=self._timeout)
        if not self._secure and self._proxy.scheme == "https":
            kind = http.client.HTTPSConnection
        connection = kind(self._proxy.hostname or "", self._proxy.port, timeout=self._timeout)
        if self._secure:
            connection.set_tunnel(self._host, self._port, _authorization(self._proxy))
        return connection


def _is_quiet(connection: http.client.HTTPConnection) -> bool:
    """Whether nothing has come since the last answer: no farewell, and nothing that nobody asked for."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed
        poll = select.poll()
        poll.register(connection.sock, select.POLLIN)
        return not poll.poll(0)
    return False


def _proxy_for(parts: urllib.parse.SplitResult) -> urllib.parse.SplitResult | None:
    # A proxy for the way out has no business between two processes of one machine.
    if _LOOPBACK.fullmatch(parts.hostname or "") or urllib.request.proxy_bypass(parts.netloc):
        return None
    url = urllib.request.getproxies().get(parts.scheme)
    if not url:
        return None
    proxy = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
    if not proxy.hostname or proxy.scheme not in ("http", "https"):
        raise ValueError(f"the variable {parts.scheme}_proxy is no URL of a proxy")  # it may have a password
    _ = proxy.port  # raises now where it is none
    return proxy


def _authorization(proxy: urllib.parse.SplitResult | None) -> dict[str, str]:
    if proxy is None or proxy.username is None:
        return {}
    user, password = (urllib.parse.unquote(part or "") for part in (proxy.username, proxy.password))
    return {"Proxy-Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}
