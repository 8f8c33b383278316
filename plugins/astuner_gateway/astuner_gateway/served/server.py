"""The server's life: it takes connections on a socket until it is told to end, and then lets answers be finished.

Invariant: when `serve_until_told` returns, nothing of it runs any more.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from astuner_gateway.listening import BACKLOG

if TYPE_CHECKING:
    from aiohttp import web

GRACE = 5.0
"""Seconds that answers under way may take when the server ends."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


async def serve_until_told(
    handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
    listening: socket.socket,
    ready: Callable[[], None],
) -> None:
    """Answer until the process is told to end, by Ctrl-C or SIGTERM; a second one ends it at once.

    :param ready: called once it answers.
    """
    from aiohttp import web

    from astuner_gateway.endpoint.handler import make_server

    loop, over = asyncio.get_running_loop(), asyncio.Event()

    def end() -> None:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
        over.set()

    for number in _SIGNALS:
        loop.add_signal_handler(number, end)
    runner = web.ServerRunner(make_server(handler), shutdown_timeout=GRACE)
    await runner.setup()
    try:
        await web.SockSite(runner, listening, backlog=BACKLOG).start()
        ready()
        await over.wait()
    finally:
        await runner.cleanup()
