"""``python -m astuner_view``: the viewer that the service `logview` starts, on a socket that it was given."""

from __future__ import annotations

import argparse
import asyncio
import socket
from pathlib import Path

from astuner_view.runs import Runs
from astuner_view.serving import address, serve


def main() -> None:
    parser = argparse.ArgumentParser(prog="astuner_view", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="the socket, which listens already")
    parser.add_argument("--host", required=True, help="where it listens")
    parser.add_argument("--run", type=Path, required=True, help="the run folder to show, which may not be there yet")
    parser.add_argument("--browser", action="store_true", help="open the page")
    given = parser.parse_args()
    runs = Runs(given.run.parent, only=given.run)
    listening = socket.socket(fileno=given.fd)
    if given.browser:
        import webbrowser

        webbrowser.open(address(listening, given.host, run=next(iter(runs.all()))))
    asyncio.run(serve(runs, listening, host=given.host, stop_with_stdin=True))


if __name__ == "__main__":
    main()
