"""``python -m astuner_env serve NAME…``: the service as a program; ``astuner run --with NAME`` starts it so."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence

from astuner.errors import AstunerError
from astuner_env.manager.served import find_environments
from astuner_env.server import serve
from astuner_env.server.guard import TOKEN_VARIABLE
from astuner_env.server.serve import IDLE_TTL


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until a signal asks to stop; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m astuner_env", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    serving = commands.add_parser("serve", help="serve environments over HTTP")
    serving.add_argument(
        "environments",
        nargs="+",
        metavar="NAME",
        help="registered, or code as [NAME=]file.py->Class",
    )
    serving.add_argument("--host", default="127.0.0.1", help=f"other than loopback wants ${TOKEN_VARIABLE}")
    serving.add_argument("--port", type=int, default=8080, help="0 takes a free one")
    serving.add_argument("--max-instances", type=int, help="by default as many as the machine can hold")
    serving.add_argument("--idle-ttl", type=float, default=IDLE_TTL, help="seconds until an unused instance is ended")
    serving.add_argument("--log-json", action="store_true", help="one JSON object per log line")
    serving.add_argument("--debug", action="store_true", help="log every request, send tracebacks to clients")
    serving.add_argument("--stop-with-stdin", action="store_true", help="stop when standard input closes")
    given = parser.parse_args(arguments)
    try:
        asyncio.run(
            serve(
                find_environments(given.environments),
                host=given.host,
                port=given.port,
                token=os.environ.get(TOKEN_VARIABLE, ""),
                max_instances=given.max_instances,
                idle_ttl=given.idle_ttl,
                log_json=given.log_json,
                debug=given.debug,
                stop_with_stdin=given.stop_with_stdin,
            )
        )
    except AstunerError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
