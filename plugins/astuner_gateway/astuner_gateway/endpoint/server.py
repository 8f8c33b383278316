"""Run the endpoint: bind the port, serve on an event loop, issue and revoke keys.

The port is bound immediately in the calling thread, so that the URL is known before the server runs; clients that
connect earlier wait in the socket's backlog. The server is a task of the engine's event loop and ends with it.
Invariant: there is at most one server, and it listens on loopback unless a token is set.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from astuner.contracts.errors import AstunerError, ConfigError, MissingDependency
from astuner.contracts.parts import EndpointPart
from astuner.contracts.proxies import bypass_proxies
from astuner_gateway.endpoint.access import Access, KeyRing
from astuner_gateway.endpoint.replay import Replays
from astuner_gateway.listening import bind, check_open, own_key, url_of

if TYPE_CHECKING:
    from astuner import EndpointSection, ModelTuner


_SAID = {"host_at": "astuner.endpoint.host", "key_at": "astuner.endpoint.token_env"}


class Endpoint(EndpointPart):
    """Implement the part ``endpoint``: serve the models of running episodes over HTTP. Thread-safe.

    :param host: Address to listen on.
    :param port: Port; 0 selects a free one.
    :param token: Suffix of every key; required unless ``host`` is loopback.
    :param grace: Seconds that a generation continues after its client disconnected.
    :param overrules: Whether the run's sampling applies to agents that train, whatever their requests contain.
    :raises ConfigError: Other machines could reach the endpoint without a token, or the token cannot be part of a key.
    """

    def __init__(
        self, host: str = "127.0.0.1", port: int = 0, token: str = "", grace: float = 10.0, overrules: bool = True
    ) -> None:
        check_open(host, token, **_SAID)
        self._overrules = overrules
        self._host, self._port = host, port
        self._keys = KeyRing(token)
        self._replays = Replays(grace)
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._socket: socket.socket | None = None
        self._task: asyncio.Task[None] | None = None

    @classmethod
    def of(cls, section: EndpointSection) -> Endpoint:
        """Return the endpoint for ``astuner.endpoint`` of a config.

        :raises ConfigError: The token's variable is not set, or as for the class.
        """
        token = own_key(section.host, section.token_env, **_SAID) or ""
        return cls(section.host, section.port, token, section.reconnect_timeout, section.sampling == "run")

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Bind the port and start serving on ``loop``; do nothing if the endpoint is open.

        A second loop has no effect while the first one lives, because calls are passed to each model's own loop.

        :raises MissingDependency: aiohttp is not installed.
        :raises ConfigError: The address cannot be bound.
        """
        try:
            import aiohttp.web  # noqa: F401 (reports a missing package early)
        except ImportError as e:
            raise MissingDependency(
                f"the endpoint needs the package aiohttp ({e}). Install it with: pip install astuner-gateway"
            ) from e
        with self._lock:
            if self._loop is not None and self._lives(loop):
                return
            self._forget_server()
            try:
                bound = bind(self._host, self._port, listen=True)
            except ConfigError as e:
                raise ConfigError(f"astuner.endpoint.host and .port: {e}") from None
            bypass_proxies(urlsplit(url_of(self._host, bound)).hostname or "")
            # first, because _start may read them from another thread immediately
            self._loop, self._socket = loop, bound
            try:
                loop.call_soon_threadsafe(self._start, bound)
            except RuntimeError:
                self._forget_server()  # closes the socket, since no server took it over
                raise AstunerError("the endpoint cannot start on an event loop that is closed") from None

    def issue(self, tuner: ModelTuner, agent_name: str, role: str | None = None) -> Access:
        """Return the URL and key for one agent of an episode, the same ones on each call.

        :raises AstunerError: The endpoint is not open.
        """
        if self._socket is None:
            raise AstunerError("the endpoint is not open; call open(loop) first")
        return Access(
            f"{url_of(self._host, self._socket)}/v1", self._keys.issue(tuner, agent_name, role), tuner.model_name
        )

    def revoke(self, tuner: ModelTuner) -> None:
        """Revoke the keys of an episode that has ended and cancel its running generations."""
        digests = self._keys.revoke(tuner)
        loop = self._loop
        if not digests or loop is None:
            return
        if loop is _running_loop():
            self._replays.cancel(digests.__contains__)  # immediately: the caller counts the episode's turns next
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nothing runs on it
            loop.call_soon_threadsafe(self._replays.cancel, digests.__contains__)

    async def close(self) -> None:
        """Stop serving. The endpoint can be opened again."""
        with self._lock:
            loop, task = self._loop, self._task
            self._forget_server()
        if task is None or loop is None or loop.is_closed():
            return
        if loop is asyncio.get_running_loop():
            await _stop(task)
        elif loop.is_running():
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_stop(task), loop))

    def _lives(self, other: asyncio.AbstractEventLoop) -> bool:
        """Return whether the server runs, or will run as soon as its loop does."""
        assert self._loop is not None
        if self._loop.is_closed() or (self._task is not None and self._task.done()):
            return False
        return self._loop is other or self._loop.is_running()

    def _forget_server(self) -> None:
        """Forget the server's task and close a socket that no server took over."""
        if self._socket is not None and (self._task is None or (self._loop is not None and self._loop.is_closed())):
            self._socket.close()
        self._loop = self._socket = self._task = None

    def _start(self, bound: socket.socket) -> None:
        if self._socket is bound:  # not closed in the meantime
            self._task = asyncio.get_running_loop().create_task(self._serve(bound), name="astuner-endpoint")

    async def _serve(self, bound: socket.socket) -> None:
        from astuner_gateway.endpoint.handler import Handler
        from astuner_gateway.gate import running

        try:
            handler = Handler(self._keys, self._replays, self._host, overrules=self._overrules)
            async with running(handler, bound, grace=1.0):
                try:
                    await asyncio.Event().wait()  # until canceled
                finally:
                    self._replays.cancel(lambda key: True)
        finally:
            bound.close()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


async def _stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
