"""The collector as a process: its address, the file that tells applications where it is, and a clean end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from astuner_flywheel.receiver.server import FEEDBACK, TRACES, Handler, Terms
from astuner_flywheel.receiver.store import Store
from astuner_gateway.access_file import write
from astuner_gateway.endpoint.handler import make_server
from astuner_gateway.endpoint.server import reachable
from astuner_gateway.listening import BACKLOG, is_loopback, own_key


def terms_of(host: str, key_env: str | None) -> Terms:
    """
    :raises ConfigError: others could reach it without a key, or the key cannot be one.
    """
    key = own_key(host, key_env, host_at="--host", key_at="--key-env")
    return Terms(host=host, loopback=is_loopback(host), key=key or "")


def url_of(host: str, listening: socket.socket) -> str:
    name = reachable(host)
    return f"http://{f'[{name}]' if ':' in name else name}:{listening.getsockname()[1]}"


@contextmanager
def access_file(url: str, terms: Terms, port: int, database: Path) -> Iterator[Path]:
    """The file that tells applications where the collector is; for this user only, and gone after the block."""
    access = {
        "traces_url": f"{url}{TRACES}",
        "feedback_url": f"{url}{FEEDBACK}",
        "api_key": terms.key or None,
        "database": str(database.absolute()),
        "pid": os.getpid(),
    }
    path = write("collect", port, access)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


async def serve(terms: Terms, store: Store, listening: socket.socket, ready: Callable[[], None]) -> Counter[str]:
    """Answer until SIGINT or SIGTERM; returns the counts.

    :param ready: is called when the first request can come.
    """
    from aiohttp import web

    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, over.set)
    handler = Handler(terms, store)
    runner = web.ServerRunner(make_server(handler), shutdown_timeout=3.0)
    await runner.setup()
    try:
        await web.SockSite(runner, listening, backlog=BACKLOG).start()
        ready()
        await over.wait()
    finally:
        await runner.cleanup()
        await handler.finished()
    return handler.counts
