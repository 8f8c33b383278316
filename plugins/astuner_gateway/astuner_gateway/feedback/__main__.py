"""The service's process: ``python -m astuner_gateway.feedback``, started by `astuner_gateway.feedback.service`.

Its first line of standard input is one JSON object with its terms and the file descriptor of a socket that listens
already, so no key is among its arguments or variables.  It ends with SIGTERM, or when its standard input does, as it
does with the process that started it.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys

from astuner.support.threads import in_daemon_thread
from astuner_gateway.feedback.conversations import Conversations
from astuner_gateway.feedback.server import Handler, Terms
from astuner_gateway.feedback.upstream import CONNECT_TIMEOUT
from astuner_gateway.gate import serve_until_told


async def serve(terms: Terms, listening: socket.socket) -> None:
    """Serve until the process is told to end."""
    from aiohttp import ClientSession, ClientTimeout, TCPConnector

    over = asyncio.Event()
    orphaned = asyncio.ensure_future(in_daemon_thread(sys.stdin.read))
    orphaned.add_done_callback(lambda done: over.set())
    # No limits: a conversation may wait long for its model, and there are as many of them as episodes.
    timeout = ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT)
    async with ClientSession(timeout=timeout, connector=TCPConnector(limit=0), trust_env=False) as session:

        def ready() -> None:
            print(f"the feedback service listens on {listening.getsockname()[:2]}", flush=True)

        await serve_until_told(Handler(terms, session, Conversations()), listening, ready, grace=1.0, over=over)


def main() -> None:
    given = json.loads(sys.stdin.readline())
    asyncio.run(serve(Terms(**given["terms"]), socket.socket(fileno=given["socket"])))


if __name__ == "__main__":
    main()
