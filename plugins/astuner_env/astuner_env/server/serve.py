"""The service's life: bind, import every environment, listen, and end without leaving a process behind.

Invariant: ``Starting server on HOST:PORT`` is printed when requests are answered, and not before; whatever happens
after that, no process outlives the service, not even when it is killed (the zygotes see to that).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from astuner.contracts.errors import ConfigError
from astuner_env.env_service.server import TOKEN_VARIABLE
from astuner_env.manager.capacity import IDLE_TTL, Capacity, capacity
from astuner_env.manager.folders import Root
from astuner_env.manager.manager import Manager
from astuner_env.manager.metrics import Metrics
from astuner_env.manager.served import ServedEnvironment
from astuner_env.server.app import make_app
from astuner_env.server.guard import Guard
from astuner_env.server.logs import set_up
from astuner_gateway.listening import BACKLOG, bind, quiet_http_logger

log = logging.getLogger("astuner_env")

_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class Service:
    """A service that listens."""

    host: str
    port: int
    manager: Manager

    @property
    def url(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


async def serve(
    environments: Sequence[ServedEnvironment],
    *,
    host: str = "127.0.0.1",
    port: int = 8080,
    token: str = "",
    max_instances: int | None = None,
    idle_ttl: float = IDLE_TTL,
    log_json: bool = False,
    debug: bool = False,
    stop_with_stdin: bool = False,
) -> None:
    """Serve until a signal asks to stop.

    :param token: what every request must bring; required unless ``host`` is loopback.
    :param max_instances: None: as many as the machine can hold.
    :param idle_ttl: seconds after which an instance that nobody asks is ended.
    :param debug: log every request, and send environments' tracebacks to clients.
    :param stop_with_stdin: stop as well when standard input closes, because whoever started this is gone.
    :raises ConfigError: the address cannot be bound or is open to others, or a number makes no sense.
    :raises RunError: an environment cannot be imported.
    """
    set_up(as_json=log_json, debug=debug, secrets=_secrets(environments, token))
    task = asyncio.current_task()
    assert task is not None
    stopping = False

    def stop(why: str) -> None:
        nonlocal stopping
        if not stopping:  # a second one must not interrupt the tidying up
            stopping = True
            log.info("stopping", extra={"because": why})
            task.cancel()

    loop = asyncio.get_running_loop()
    for number in _STOP:
        loop.add_signal_handler(number, stop, number.name)
    if stop_with_stdin:
        _when_closed(sys.stdin.fileno(), lambda: stop("standard input closed"))
    try:
        async with running(
            environments,
            host=host,
            port=port,
            token=token,
            max_instances=max_instances,
            idle_ttl=idle_ttl,
            debug=debug,
        ) as service:
            print(f"Starting server on {service.host}:{service.port}", flush=True)
            await asyncio.Event().wait()
    except asyncio.CancelledError:
        if not stopping:
            raise
    finally:
        for number in _STOP:
            loop.remove_signal_handler(number)


@contextlib.asynccontextmanager
async def running(
    environments: Sequence[ServedEnvironment],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str = "",
    max_instances: int | None = None,
    idle_ttl: float = IDLE_TTL,
    patience: float = 30.0,
    debug: bool = False,
    parent: Path | None = None,
) -> AsyncIterator[Service]:
    """A service for as long as the block runs; parameters and errors as `serve`.

    :param port: 0 takes a free one.
    :param patience: seconds a request for a new instance waits for a slot.
    :param parent: where its folder is made.
    """
    if not environments:
        raise ConfigError("name an environment to serve; `astuner env list` says which there are")
    if idle_ttl <= 0 or (max_instances is not None and max_instances < 1):
        raise ConfigError("--max-instances and --idle-ttl must be more than 0")
    guard = Guard(host, token)
    room = capacity(e.memory_mb for e in environments)
    if max_instances is not None:
        room = Capacity(max_instances, "as it was asked for")
    bound = bind(host, port)
    with contextlib.closing(bound), Root(parent) as root:
        manager = Manager(
            environments,
            root,
            Metrics(e.name for e in environments),
            max_instances=room.instances,
            idle_ttl=idle_ttl,
            patience=patience,
        )
        sweeper = asyncio.ensure_future(_sweep(manager, min(10.0, idle_ttl / 4)))
        app = make_app(manager, guard, room.why, debug=debug)
        quiet: Any = {
            "access_log": None,
            "logger": quiet_http_logger("astuner_env.malformed"),
            "auto_decompress": False,
            "lingering_time": 1.0,
        }
        runner = web.AppRunner(app, shutdown_timeout=1.0, **quiet)
        try:
            await manager.start()
            await runner.setup()
            await web.SockSite(runner, bound, backlog=BACKLOG).start()
            service = Service(host, bound.getsockname()[1], manager)
            names = ", ".join(manager.environments)
            extra = {"url": service.url, "environments": names, "max_instances": room.instances, "because": room.why}
            log.info("listening", extra=extra)
            yield service
        finally:
            sweeper.cancel()
            for site in list(runner.sites):
                await site.stop()
            await manager.stop()
            await runner.cleanup()
            log.info("stopped")


def _when_closed(descriptor: int, then: Callable[[], None]) -> None:
    """Call ``then`` when the other end of a pipe is gone; what comes through it is thrown away."""
    loop = asyncio.get_running_loop()

    def look() -> None:
        if not os.read(descriptor, 4096):
            loop.remove_reader(descriptor)
            then()

    loop.add_reader(descriptor, look)


async def _sweep(manager: Manager, every: float) -> None:
    while True:
        await asyncio.sleep(every)
        try:
            await manager.sweep()
        except Exception:
            log.exception("the sweep failed, and goes on")


def _secrets(environments: Sequence[ServedEnvironment], token: str) -> list[str]:
    """What must not be logged: the token, and what an environment was given under a name that says so."""
    words = ("KEY", "TOKEN", "SECRET", "PASSWORD")
    given = [
        value
        for environment in environments
        for name, value in environment.environ.items()
        if len(value) >= 6 and any(word in name.upper() for word in words)
    ]
    return [token, *given, os.environ.get(TOKEN_VARIABLE, "")]
