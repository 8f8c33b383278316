"""Start a Ray node next to the run that ends with the process that started it.

``python -m astuner_ray.node ARGUMENTS`` is ``ray start ARGUMENTS --block`` that also ends when its standard input
closes, as a pipe does when the process at the other end dies, even by SIGKILL.  It has a separate session: Ctrl-C in
the terminal reaches only the run, which stops gracefully.

Only that process imports Ray.  Invariant: after `RayNode.stop` none of its processes run.
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
"""Seconds that a node has to stop gracefully."""
_TAIL = 2000


class RayNode:
    """One ``ray start`` process and all its children."""

    def __init__(
        self, arguments: Sequence[str], *, what: str, log: Path | None, variables: Mapping[str, str] | None = None
    ) -> None:
        """Prepare a node without starting it.

        :param arguments: Arguments of ``ray start``.
        :param what: Name for messages.
        :param log: File that receives the node's output, appended; None: discard it.
        :param variables: Environment variables in addition to this process's.
        """
        self.what = what
        self.log = log or Path(os.devnull)
        self._arguments = tuple(arguments)
        self._variables = dict(variables or {})
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the node without waiting for it."""
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
        with contextlib.suppress(ProcessLookupError):  # ended already; `check` reports it
            record_process(self._process.pid, self.what)

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def check(self) -> None:
        """Check that the node is running.

        :raises RunError: The node has ended; the message shows the end of its log.
        """
        if not self.is_running:
            said = self.log.read_text(encoding="utf-8", errors="replace").strip()
            raise RunError(f"{self.what} ended" + (f"; last lines of {self.log}:\n{said[-_TAIL:]}" if said else ""))

    def stop(self) -> None:
        """Stop the node gracefully, then kill it; also after a failed start."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # its group is empty
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        forget_process(process.pid)


def answers(address: str, variables: Mapping[str, str] | None = None) -> bool:
    """Return whether a Ray cluster answers at ``host:port`` and accepts this user; takes seconds in a subprocess."""
    if not listens(address):
        return False
    command = [sys.executable, "-m", "astuner_ray.node", "health-check", "--address", address]
    with contextlib.suppress(subprocess.TimeoutExpired):
        environ = {**os.environ, **(variables or {})}
        return subprocess.run(command, env=environ, capture_output=True, timeout=60, check=False).returncode == 0
    return False


def listens(address: str) -> bool:
    """Return whether a process listens at ``host:port``."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=3.0).close()
    except (OSError, ValueError):
        return False
    return True


def main(arguments: Sequence[str]) -> None:
    """Run Ray's own command and end it when standard input closes."""
    (command,) = importlib.metadata.entry_points(group="console_scripts", name="ray")
    ray = command.load()
    if arguments[:1] == ["health-check"]:
        sys.argv = ["ray", *arguments]
        ray()
        return

    def end_with_stdin() -> None:
        while os.read(0, 1024):  # not sys.stdin: a daemon thread would hold its lock when the interpreter exits
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_with_stdin, daemon=True).start()
    sys.argv = ["ray", "start", *arguments, "--block"]
    ray()


if __name__ == "__main__":
    main(sys.argv[1:])
