"""The viewer's socket, its address, and the server until it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Sequence
from urllib.parse import quote, urlencode

from astuner.contracts.errors import ConfigError
from astuner_gateway.gate import serve_until_told, when_closed
from astuner_gateway.listening import bind, url_of
from astuner_view.app import Viewer
from astuner_view.runs import Runs
from astuner_view.settings import DEFAULT_PORT

_TRIED = 100
"""Number of ports to try, starting at the default."""


def open_socket(host: str, port: int | None, option: str = "--port N") -> socket.socket:
    """Return a listening socket.

    :param port: None uses 8181 or the next free port; 0 any free port.
    :param option: the option that sets the port, for messages.
    :raises ConfigError: the address is not available.
    """
    if port is not None:
        try:
            return bind(host, port, listen=True)
        except ConfigError as e:
            raise ConfigError(f"{e}. Choose another port with {option}, or omit it to use a free one") from None
    bind(host, 0).close()  # if this fails, the port is not the reason
    for usual in range(DEFAULT_PORT, DEFAULT_PORT + _TRIED):
        with contextlib.suppress(ConfigError):
            return bind(host, usual, listen=True)
    last = DEFAULT_PORT + _TRIED - 1
    raise ConfigError(f"All ports from {DEFAULT_PORT} to {last} are in use. Choose another with {option}")


def address(
    listening: socket.socket, host: str, *, run: str = "", episodes: Sequence[tuple[str, str]] = (), token: str = ""
) -> str:
    """Return the address to open in a browser.

    :param run: ID of the run to show first.
    :param episodes: run ID and episode ID of an episode to show first, or of two to compare.
    """
    query = f"?token={quote(token)}" if token else ""
    page = f"#/run/{quote(run, safe='')}" if run else ""
    if len(episodes) == 1:
        page = f"#/run/{quote(episodes[0][0], safe='')}/episode/{quote(episodes[0][1], safe='')}"
    elif episodes:
        left, right = ("/".join(place) for place in episodes)
        page = f"#/compare?{urlencode({'left': left, 'right': right})}"
    return f"{url_of(host, listening)}/{query}{page}"


async def serve(
    runs: Runs, listening: socket.socket, *, host: str, token: str = "", stop_with_stdin: bool = False
) -> None:
    """Answer requests until SIGINT or SIGTERM.

    :param stop_with_stdin: also stop when standard input closes, because the parent process is gone.
    :raises ConfigError: the server would be accessible without a token.
    """
    over = asyncio.Event()
    viewer = Viewer(runs, host=host, port=listening.getsockname()[1], token=token, is_stopping=over.is_set)
    if stop_with_stdin:
        when_closed(sys.stdin.fileno(), over.set)
    try:
        await serve_until_told(viewer, listening, lambda: None, grace=3.0, over=over)
    finally:
        viewer.close()
