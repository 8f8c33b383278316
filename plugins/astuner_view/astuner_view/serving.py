"""The address, and the server until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from urllib.parse import quote

from astuner.contracts.errors import ConfigError
from astuner_gateway.gate import serve_until_told, when_closed
from astuner_gateway.listening import bind, url_of
from astuner_view.app import Viewer
from astuner_view.runs import Runs
from astuner_view.settings import DEFAULT_PORT

_TRIED = 100
"""Ports from the usual one on."""


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
    query = f"?token={quote(token)}" if token else ""
    return f"{url_of(host, listening)}/{query}" + (f"#/run/{quote(run, safe='')}" if run else "")


async def serve(
    runs: Runs, listening: socket.socket, *, host: str, token: str = "", stop_with_stdin: bool = False
) -> None:
    """Answer until SIGINT or SIGTERM.

    :param stop_with_stdin: stop as well when standard input closes, because whoever started this is gone.
    :raises ConfigError: the server would be open to others.
    """
    over = asyncio.Event()
    viewer = Viewer(runs, host=host, port=listening.getsockname()[1], token=token, is_stopping=over.is_set)
    if stop_with_stdin:
        when_closed(sys.stdin.fileno(), over.set)
    try:
        await serve_until_told(viewer, listening, lambda: None, grace=3.0, over=over)
    finally:
        viewer.close()
