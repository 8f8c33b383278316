"""Watching one run from outside: collecting what it prints, and stopping it at a limit.

The code cannot be trusted to say anything: that it has ended is what the kernel told the zygote.
"""

from __future__ import annotations

import io
import os
import select
import threading
import time
from pathlib import Path

from astuner_sandbox.isolation.proc import THREADS, number
from astuner_sandbox.isolation.zygotes import Fork
from astuner_sandbox.result import Outcome, SandboxFailed, SandboxLimits
from astuner_sandbox.scratch import usage

TICK = 0.05
"""Seconds between two looks at what nothing tells us of."""
_GONE_WITHIN = 10.0


class Watch:
    """One run; made when its process is about to start the code.

    :param output: the reading ends of its standard output and error.
    :param cancelled: set by whoever does not want the result any more.
    """

    def __init__(
        self, fork: Fork, output: tuple[int, int], folder: Path, limits: SandboxLimits, cancelled: threading.Event
    ) -> None:
        self.fork, self.folder, self.limits, self.cancelled = fork, folder, limits, cancelled
        self.said = {descriptor: bytearray() for descriptor in output}
        self.open = set(output)
        for descriptor in output:
            os.set_blocking(descriptor, False)

    def until_the_end(self, seconds: float) -> Outcome | None:
        """Wait until it has ended or is stopped; the limit that stopped it, None when it ended without us.

        :raises SandboxFailed: it cannot be killed.
        """
        stopped = self._stopped_by(time.monotonic() + seconds)
        if stopped is not None:
            self.fork.kill()
            if self.fork.wait(_GONE_WITHIN) is None:
                raise SandboxFailed(f"process {self.fork.pid} of the sandbox does not end; look at what it waits for")
        too_much = self._read()
        return "output" if too_much and stopped is None else stopped

    def text(self, descriptor: io.FileIO) -> str:
        """What it printed there."""
        return bytes(self.said[descriptor.fileno()]).decode(errors="replace")

    def _stopped_by(self, deadline: float) -> Outcome | None:
        look = time.monotonic() + TICK
        while self.fork.ended is None:
            now = time.monotonic()
            if now >= deadline or self.cancelled.is_set():
                return "timeout"
            if now >= look:
                if limit := self._too_much():
                    return limit
                look = time.monotonic() + TICK
            pause = max(0.0, min(deadline, look) - now)
            if not self.open:  # it has ended, or closed its output
                self.fork.wait(pause)
            elif self._wait_for_output(pause) and self._read():
                return "output"
        return None

    def _wait_for_output(self, pause: float) -> bool:
        poll = select.poll()
        for descriptor in self.open:
            poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(pause * 1000))

    def _read(self) -> bool:
        """Take what there is; whether it is more than is allowed."""
        most = self.limits.output_kb << 10
        for descriptor in tuple(self.open):
            said = self.said[descriptor]
            try:
                while len(said) <= most and (data := os.read(descriptor, 1 << 16)):
                    said += data
            except BlockingIOError:
                continue
            if len(said) > most:
                del said[most:]
                return True
            self.open.discard(descriptor)
        return False

    def _too_much(self) -> Outcome | None:
        size, files = usage(self.folder, most=self.limits.files)
        if size > self.limits.disk_mb << 20 or files > self.limits.files:
            return "disk"
        return "threads" if number(self.fork.pid, THREADS) > self.limits.threads else None
