"""``python -m astuner_view``: serve the viewer on an inherited socket, as the service `logview` starts it."""

from __future__ import annotations

import argparse
import asyncio
import socket
from pathlib import Path

from astuner_view.runs import Runs
from astuner_view.serving import address, serve


def main() -> None:
    """Serve the viewer until it is stopped."""
    parser = argparse.ArgumentParser(prog="astuner_view", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="File descriptor of the listening socket")
    parser.add_argument("--host", required=True, help="Address that the socket listens on")
    parser.add_argument("--run", type=Path, required=True, help="Run folder to show; it may not exist yet")
    parser.add_argument("--browser", action="store_true", help="Open the page in the browser")
    given = parser.parse_args()
    runs = Runs(given.run.parent, only=given.run)
    listening = socket.socket(fileno=given.fd)
    if given.browser:
        import webbrowser

        webbrowser.open(address(listening, given.host, run=next(iter(runs.all()))))
    asyncio.run(serve(runs, listening, host=given.host, stop_with_stdin=True))


if __name__ == "__main__":
    main()
