"""``--with logview``: the viewer in a process of its own, which shows the run that it stands beside.

It gets a socket that listens already, so that its address is known at once, and nobody takes the port in between.  It
stops when it is told to, and when the process that started it is gone.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from astuner.contracts.errors import RunError
from astuner_gateway.beside import ProcessService
from astuner_view.runs import Runs
from astuner_view.serving import address, open_socket
from astuner_view.settings import LogViewConfig

HOST = "127.0.0.1"


class LogView(ProcessService):
    """The viewer beside a run."""

    what = "log viewer"

    def __init__(self, config: Any = None) -> None:
        super().__init__(config or LogViewConfig())
        self._base = ""
        self._address = ""

    def start(self, *, url: str = "", log: Path | None = None) -> None:
        """Start it; ``url`` is the environment service's, and nothing to it.

        :raises ConfigError: the port of ``astuner.services.logview.port`` is taken.
        :raises RunError: there is no run to stand beside.
        """
        if self.run_dir is None:
            raise RunError("logview shows the run that it stands beside; for others, type: astuner view")
        run = self.run_dir.absolute()
        listening = open_socket(HOST, self.config.port, option="astuner.services.logview.port=N")
        with listening:
            self._base = address(listening, HOST)
            self._address = address(listening, HOST, run=next(iter(Runs(run.parent, only=run).all())))
            command = [sys.executable, "-m", "astuner_view", "--fd", str(listening.fileno())]
            command += ["--host", HOST, "--run", str(run), *(["--browser"] if self.config.browser else [])]
            self.launch(command, log, run_dir=run, pass_fds=[listening.fileno()])

    def is_ready(self) -> bool:
        """:raises RunError: it has ended."""
        return self.answers(self._base.rstrip("/"))

    def address(self) -> str:
        return self._address
