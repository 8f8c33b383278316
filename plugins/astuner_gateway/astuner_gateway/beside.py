"""A service that is a process of its own beside the run: started with it, and gone with it, whatever happens.

It is in a session of its own, since Ctrl-C in the terminal is for the run, which stops things in order.  Its standard
input is a pipe, which closes when this process ends, even by SIGKILL; a service of ours then ends too.  Invariant: what
was started is in one process group, which is gone when `ProcessService.stop` returns; nothing else is ever signalled.
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
    """Starts a process, knows whether it is over, and ends it."""

    what = "service"
    """What messages call it."""
    grace = 5.0
    """Seconds it may take to stop in order."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._process: subprocess.Popen[bytes] | None = None
        self._log: Path | None = None

    def launch(
        self, command: Sequence[str], log: Path | None, *, run_dir: Path | str = "", told: bytes = b"", **options: Any
    ) -> int:
        """Start the process; its number.

        :param log: the file for what it says, appended to; None: nowhere.
        :param run_dir: what `astuner kill --run-dir` knows it by.
        :param told: the first thing in its standard input.
        :param options: more of `subprocess.Popen`.
        """
        self._log = log
        with open(log or os.devnull, "ab") as said:
            options = {"stdin": subprocess.PIPE, **options}
            process = self._process = subprocess.Popen(
                command, stdout=said, stderr=subprocess.STDOUT, start_new_session=True, **options
            )
        with contextlib.suppress(ProcessLookupError):  # over already: `check` says so
            record_process(process.pid, self.what, run_dir)
        if told and process.stdin is not None:
            process.stdin.write(told)
            process.stdin.flush()
        return process.pid

    def check(self) -> None:
        """
        :raises RunError: it has ended; says why, as far as its log does.
        """
        if self._process is not None and not _ended(self._process):
            return
        said = self.said().strip()
        _, is_ours, why = f"\n{said}".rpartition("\nerror: ")  # how commands of ours end
        if is_ours:
            raise RunError(f"the {self.what} did not start: {why[-_TAIL:]} (its log: {self._log})")
        end = f"; the end of {self._log}:\n{said[-_TAIL:]}" if said else f", without a word ({self._log})"
        raise RunError(f"the {self.what} ended at its start{end}")

    def answers(self, url: str) -> bool:
        """Whether one of our applications answers there; raises as `check`."""
        self.check()
        return JsonClient(url, timeout=5.0).is_up(HEALTH)

    def said(self) -> str:
        """What is in its log."""
        return "" if self._log is None else self._log.read_text(encoding="utf-8", errors="replace")

    def stop(self) -> None:
        """Ask it to stop, and after a while make it; with everything that it started in its process group."""
        process, self._process = self._process, None
        if process is None:
            return
        signal_group(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + self.grace
        while not _ended(process) and time.monotonic() < deadline:
            time.sleep(0.05)
        signal_group(process.pid, signal.SIGKILL)  # before it is reaped, its number cannot be another group's
        process.wait()
        if process.stdin is not None:
            process.stdin.close()
        forget_process(process.pid)


def _ended(process: subprocess.Popen[Any]) -> bool:
    """Whether the process is over, without reaping it: until then its process group is nobody else's."""
    if process.returncode is not None:
        return True
    if not hasattr(os, "waitid"):
        return process.poll() is not None
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None


def signal_group(group: int, number: signal.Signals) -> None:
    """To all processes of a group, if there are any."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left (macOS: or only a zombie)
        os.killpg(group, number)
