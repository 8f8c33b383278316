"""Run a service as a separate process that starts and ends with the run.

The process has its own session, because Ctrl-C in the terminal is meant for the run, which shuts down gracefully. Its
standard input is a pipe that closes when this process ends, even after SIGKILL; ASTuner's services exit when it closes.
Invariant: all started processes belong to one process group, which no longer exists when `ProcessService.stop` returns.
No other process is ever signaled.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from astuner import forget_process, record_process
from astuner.contracts.errors import RunError
from astuner.contracts.service import Service
from astuner_gateway.gate import HEALTH
from astuner_http.client import JsonClient

_TAIL = 2000


class ProcessService(Service):
    """A service that runs in a child process."""

    what = "service"
    """Name of the service in messages."""
    grace = 5.0
    """Seconds that the process has to shut down after SIGTERM."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._process: subprocess.Popen[bytes] | None = None
        self._log: Path | None = None

    def launch(
        self, command: Sequence[str], log: Path | None, *, run_dir: Path | str = "", told: bytes = b"", **options: Any
    ) -> int:
        """Start the process and return its process ID.

        :param log: File to which its output is appended; None discards the output.
        :param run_dir: Run folder under which `astuner kill --run-dir` finds the process.
        :param told: Bytes to write to its standard input first.
        :param options: Additional arguments of `subprocess.Popen`.
        """
        self._log = log
        with open(log or os.devnull, "ab") as said:
            options = {"stdin": subprocess.PIPE, **options}
            process = self._process = subprocess.Popen(
                command, stdout=said, stderr=subprocess.STDOUT, start_new_session=True, **options
            )
        with contextlib.suppress(ProcessLookupError):  # it has already ended; `check` reports that
            record_process(process.pid, self.what, run_dir)
        if told and process.stdin is not None:
            process.stdin.write(told)
            process.stdin.flush()
        return process.pid

    def check(self) -> None:
        """Raise if the process has ended.

        :raises RunError: The process has ended; the message contains the end of its log.
        """
        if self._process is not None and not _ended(self._process):
            return
        said = self.said().strip()
        _, is_ours, why = f"\n{said}".rpartition("\nerror: ")  # format in which ASTuner's commands report a failure
        if is_ours:
            raise RunError(f"the {self.what} did not start: {why[-_TAIL:]} (log: {self._log})")
        end = f"; end of {self._log}:\n{said[-_TAIL:]}" if said else f" without output ({self._log})"
        raise RunError(f"the {self.what} exited during startup{end}")

    def answers(self, url: str) -> bool:
        """Return whether the application at ``url`` answers; raise as `check` does."""
        self.check()
        return JsonClient(url, timeout=5.0).is_up(HEALTH)

    def said(self) -> str:
        """Return the contents of its log."""
        return "" if self._log is None else self._log.read_text(encoding="utf-8", errors="replace")

    def stop(self) -> None:
        """Terminate the process and its process group: first with SIGTERM, after `grace` seconds with SIGKILL."""
        process, self._process = self._process, None
        if process is None:
            return
        signal_group(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + self.grace
        while not _ended(process) and time.monotonic() < deadline:
            time.sleep(0.05)
        signal_group(process.pid, signal.SIGKILL)  # until the process is reaped, no other group can have its ID
        process.wait()
        if process.stdin is not None:
            process.stdin.close()
        forget_process(process.pid)


def _ended(process: subprocess.Popen[Any]) -> bool:
    """Return whether the process has ended, without reaping it, so that its group ID cannot be reused yet."""
    if process.returncode is not None:
        return True
    if not hasattr(os, "waitid"):
        return process.poll() is not None
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None


def signal_group(group: int, number: signal.Signals) -> None:
    """Send a signal to all processes of a group, if any exist."""
    # the group is empty (on macOS it may contain only a zombie)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
