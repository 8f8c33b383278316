"""The address, and the server until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import uvicorn

from astuner.contracts.errors import ConfigError
from astuner_gateway.listening import bind
from astuner_view.app import make_app
from astuner_view.runs import Runs
from astuner_view.settings import DEFAULT_PORT
from astuner_view.static_files import STATIC

_TRIED = 100
"""Ports from the usual one on."""
_ANYWHERE = {"0.0.0.0", "::"}


def open_socket(host: str, port: int | None, option: str = "--port N") -> socket.socket:
    """A socket that listens.

    :param port: None takes 8181, or the next one that is free; 0 takes any.
    :param option: how the person says which port.
    :raises ConfigError: the address cannot be had; says what to type.
    """
    if port is not None:
        try:
            return bind(host, port, listen=True)
        except ConfigError as e:
            raise ConfigError(f"{e}; choose another with {option}, or leave it out to take one from 8181 on") from None
    bind(host, 0).close()  # where that fails, it is not for the port
    for usual in range(DEFAULT_PORT, DEFAULT_PORT + _TRIED):
        with contextlib.suppress(ConfigError):
            return bind(host, usual, listen=True)
    last = DEFAULT_PORT + _TRIED - 1
    raise ConfigError(f"all ports from {DEFAULT_PORT} to {last} are taken; choose another with {option}")


def address(listening: socket.socket, host: str, *, run: str = "", token: str = "") -> str:
    """What to open in a browser.

    :param run: the id of a run, to begin with.
    """
    name = socket.gethostname() if host in _ANYWHERE else host
    query = f"?token={quote(token)}" if token else ""
    fragment = f"#/run/{quote(run, safe='')}" if run else ""
    return f"http://{f'[{name}]' if ':' in name else name}:{listening.getsockname()[1]}/{query}{fragment}"


def serve(
    runs: Runs,
    listening: socket.socket,
    *,
    host: str,
    token: str = "",
    static: Path = STATIC,
    stop_with_stdin: bool = False,
) -> None:
    """Answer until SIGINT or SIGTERM, which is raised again at the end.

    :param stop_with_stdin: stop as well when standard input closes, because whoever started this is gone.
    :raises ConfigError: the server would be open to others.
    """
    with server(runs, listening, host=host, token=token, static=static) as made:
        asyncio.run(_serve(made, listening, stop_with_stdin))


@contextmanager
def server(
    runs: Runs, listening: socket.socket, *, host: str, token: str = "", static: Path = STATIC
) -> Iterator[uvicorn.Server]:
    """A server that is ready to run; parameters and errors as `serve`."""
    stopping: list[uvicorn.Server] = []
    app, close = make_app(
        runs,
        host=host,
        port=listening.getsockname()[1],
        token=token,
        static=static,
        is_stopping=lambda: any(made.should_exit for made in stopping),
    )
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        loop="asyncio",
        log_config=None,
        log_level="error",  # malformed requests are no news
        access_log=False,
        proxy_headers=False,  # nobody stands before it whose word counts
        server_header=False,
        timeout_graceful_shutdown=3,
    )
    stopping.append(uvicorn.Server(config))
    try:
        yield stopping[0]
    finally:
        close()


async def _serve(made: uvicorn.Server, listening: socket.socket, stop_with_stdin: bool) -> None:
    if stop_with_stdin:
        loop, stdin = asyncio.get_running_loop(), sys.stdin.fileno()

        def look() -> None:
            if not os.read(stdin, 4096):
                loop.remove_reader(stdin)
                made.should_exit = True

        loop.add_reader(stdin, look)
    await made.serve(sockets=[listening])
