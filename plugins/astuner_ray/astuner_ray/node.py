"""A Ray node beside the run: started, and gone with whoever started it.

``python -m astuner_ray.node ARGUMENTS`` is ``ray start ARGUMENTS --block`` that also ends when its standard input
closes, as a pipe does when the process at its other end dies, be it by SIGKILL.  It lives in a session of its own:
Ctrl-C in the terminal is for the run, which stops things in order.

Ray is needed in that process only.  Invariant: after `RayNode.stop` nothing of it runs.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from astuner import forget_process, record_process
from astuner.contracts.errors import RunError
from astuner_ray.cluster import ADDRESS_VARIABLE

GRACE_SECONDS = 20.0
"""How long a node may take to stop in order."""
_TAIL = 2000


class RayNode:
    """One ``ray start`` process and everything below it."""

    def __init__(
        self, arguments: Sequence[str], *, what: str, log: Path | None, variables: Mapping[str, str] | None = None
    ) -> None:
        """
        :param arguments: for ``ray start``.
        :param what: what messages call it.
        :param log: the file for what it says, appended to; None: nowhere.
        :param variables: what it has beside this process's.
        """
        self.what = what
        self.log = log or Path(os.devnull)
        self._arguments = tuple(arguments)
        self._variables = dict(variables or {})
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and return at once."""
        variables = {name: value for name, value in os.environ.items() if name != ADDRESS_VARIABLE}
        with self.log.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "astuner_ray.node", *self._arguments],
                env={**variables, "RAY_COLOR_MODE": "false", **self._variables},
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        with contextlib.suppress(ProcessLookupError):  # over already: `check` says so
            record_process(self._process.pid, self.what)

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def check(self) -> None:
        """:raises RunError: it has ended; the end of its log is shown."""
        if not self.is_running:
            said = self.log.read_text(encoding="utf-8", errors="replace").strip()
            raise RunError(f"{self.what} ended" + (f"; the end of {self.log}:\n{said[-_TAIL:]}" if said else ""))

    def stop(self) -> None:
        """Ask it to stop, after a while make it; also after a failed start."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left in its group
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        forget_process(process.pid)


def answers(address: str, variables: Mapping[str, str] | None = None) -> bool:
    """Whether a Ray cluster answers at ``host:port`` and lets us in; takes seconds, in a process of its own."""
    if not listens(address):
        return False
    command = [sys.executable, "-m", "astuner_ray.node", "health-check", "--address", address]
    with contextlib.suppress(subprocess.TimeoutExpired):
        environ = {**os.environ, **(variables or {})}
        return subprocess.run(command, env=environ, capture_output=True, timeout=60, check=False).returncode == 0
    return False


def listens(address: str) -> bool:
    """Whether anything does, at ``host:port``."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=3.0).close()
    except (OSError, ValueError):
        return False
    return True


def main(arguments: Sequence[str]) -> None:
    """What ``python -m astuner_ray.node`` does: Ray's own command, which also ends with its standard input."""
    (command,) = importlib.metadata.entry_points(group="console_scripts", name="ray")
    ray = command.load()
    if arguments[:1] == ["health-check"]:
        sys.argv = ["ray", *arguments]
        ray()
        return

    def end_with_stdin() -> None:
        while os.read(0, 1024):  # not sys.stdin, whose lock a daemon thread would hold at the interpreter's end
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_with_stdin, daemon=True).start()
    sys.argv = ["ray", "start", *arguments, "--block"]
    ray()


if __name__ == "__main__":
    main(sys.argv[1:])
