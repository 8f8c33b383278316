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

from astuner.access_file import write
from astuner.endpoint.handler import make_server
from astuner.endpoint.server import reachable
from astuner.errors import ConfigError
from astuner.listening import BACKLOG, TOKEN_RULE, is_loopback, is_token
from astuner_flywheel.receiver.server import FEEDBACK, TRACES, Handler, Terms
from astuner_flywheel.receiver.store import Store


def terms_of(host: str, key_env: str | None) -> Terms:
    """
    :raises ConfigError: others could reach it without a key, or the key cannot be one.
    """
    local = is_loopback(host)
    if key_env is None:
        if not local:
            raise ConfigError(
                f"--host {host}: other machines can reach that, so it needs a key: --key-env NAME names the variable "
                "that holds it; or leave the host at 127.0.0.1"
            )
        return Terms(host=host, loopback=True)
    key = os.environ.get(key_env, "")
    if not is_token(key):
        wrong = "is not set" if not key else "holds no key"
        raise ConfigError(f"--key-env {key_env}: the variable {wrong}; a key has {TOKEN_RULE}")
    return Terms(host=host, loopback=local, key=key)


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
