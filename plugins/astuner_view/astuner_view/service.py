"""``--with logview``: the viewer in a separate process, for the run that starts it.

The process inherits a listening socket, so its address is known immediately and no other process can take the port. It
stops when the run stops it, and when the run's process is gone.
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
    """The viewer of a run."""

    what = "log viewer"

    def __init__(self, config: Any = None) -> None:
        super().__init__(config or LogViewConfig())
        self._base = ""
        self._address = ""

    def start(self, *, url: str = "", log: Path | None = None) -> None:
        """Start the viewer; ``url``, the address of the environment service, is ignored.

        :raises ConfigError: the port in ``astuner.services.logview.port`` is in use.
        :raises RunError: there is no run to show.
        """
        if self.run_dir is None:
            raise RunError("logview shows only the run that starts it. For other runs, use: astuner view")
        run = self.run_dir.absolute()
        listening = open_socket(HOST, self.config.port, option="astuner.services.logview.port=N")
        with listening:
            self._base = address(listening, HOST)
            self._address = address(listening, HOST, run=next(iter(Runs(run.parent, only=run).all())))
            command = [sys.executable, "-m", "astuner_view", "--fd", str(listening.fileno())]
            command += ["--host", HOST, "--run", str(run), *(["--browser"] if self.config.browser else [])]
            self.launch(command, log, run_dir=run, pass_fds=[listening.fileno()])

    def is_ready(self) -> bool:
        """Return whether the viewer answers.

        :raises RunError: its process has ended.
        """
        return self.answers(self._base.rstrip("/"))

    def address(self) -> str:
        return self._address
