"""``--with logview``: the viewer in a process of its own, which shows the run that it stands beside.

It gets a socket that listens already, so that its address is known at once, and nobody takes the port in between.  It
stops when it is told to, and when the process that started it is gone.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from astuner.contracts.errors import RunError
from astuner.contracts.service import Service
from astuner.support import processes
from astuner_view.guard import HEALTH
from astuner_view.runs import Runs
from astuner_view.serving import address, open_socket
from astuner_view.settings import LogViewConfig

HOST = "127.0.0.1"
GRACE_SECONDS = 5.0
"""How long it may take to stop in order."""


class LogView(Service):
    """The viewer beside a run."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config or LogViewConfig())
        self._process: subprocess.Popen[bytes] | None = None
        self._base = ""
        self._address = ""
        self._log: Path | None = None

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
            self._log = log
            with open(log or os.devnull, "ab") as said:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,  # closes when this process ends, even by SIGKILL
                    stdout=said,
                    stderr=subprocess.STDOUT,
                    pass_fds=[listening.fileno()],
                    start_new_session=True,  # Ctrl-C in the terminal is for the run, which stops it in order
                )
        with contextlib.suppress(ProcessLookupError):  # over already: `is_ready` says so
            processes.record(self._process.pid, "log viewer", run)

    def is_ready(self) -> bool:
        """:raises RunError: it has ended."""
        if self._process is None or self._process.poll() is not None:
            said = "" if self._log is None else self._log.read_text(encoding="utf-8", errors="replace").strip()
            raise RunError(f"the log viewer ended at its start; the end of {self._log}:\n{said[-2000:]}")
        try:
            with _opener.open(self._base.rstrip("/") + HEALTH, timeout=5.0) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdin is not None:
            process.stdin.close()
        processes.forget(process.pid)

    def address(self) -> str:
        return self._address


_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""A proxy of the person's is for elsewhere."""
