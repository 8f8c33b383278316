"""A warm Python sandbox: one forked, confined process per run of code.

The zygote has the usual modules imported, so a run costs milliseconds.  Two runs share nothing that either can write.
A zygote that was killed is replaced, and the run repeated once: the code that was running cannot have changed
anything.  Safe to use from several threads and event loops at once.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import logging
import math
import os
import select
import signal
import stat
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from astuner import in_daemon_thread
from astuner.contracts.errors import EnvironmentFailed
from astuner_sandbox.isolation.channel import Channel
from astuner_sandbox.isolation.confine import Confinement, Level, NotConfined, readable
from astuner_sandbox.isolation.proc import THREADS, number
from astuner_sandbox.isolation.scratch import Root, clear
from astuner_sandbox.isolation.zygotes import Fork, Keeper, Zygote, ZygoteFailed, ZygoteSpec

Outcome = Literal["finished", "timeout", "cpu", "output", "disk", "threads", "killed"]
_START_WITHIN = 60.0
_GONE_WITHIN = 10.0
TICK = 0.05
"""Seconds between two looks at what nothing tells us of."""
_REASONS: dict[Outcome, str] = {
    "timeout": "TimeoutError: stopped after {seconds:g} seconds.",
    "cpu": "TimeoutError: stopped after {cpu_seconds} seconds of processor time.",
    "output": "Stopped: it printed more than {output_kb} KiB.",
    "disk": "Stopped: it wrote more than {disk_mb} MiB or {files} files.",
    "threads": "Stopped: it started more than {threads} threads.",
}
_ONE_THREAD_EACH = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL", "NUMEXPR")}
_said: set[tuple[str, ...]] = set()
"""What was warned about in this process."""


class SandboxFailed(EnvironmentFailed):
    """The sandbox itself broke; says nothing about the code."""


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """What one run may use; what goes beyond is stopped, or fails inside the code with an ordinary exception."""

    seconds: float = 300
    """Of wall time; a run may ask for less, never for more."""
    cpu_seconds: int = 60
    """Of processor time, all threads together."""
    memory_mb: int = 1024
    """Address space in MiB, the interpreter's own (about 40) included: beyond it there is a MemoryError."""
    file_mb: int = 16
    """The size of one file in MiB: beyond it writing fails."""
    disk_mb: int = 64
    """All files of a run together in MiB; looked at twenty times a second."""
    files: int = 2000
    """Files and folders of a run; looked at likewise."""
    open_files: int = 64
    threads: int = 64
    """Looked at likewise."""
    output_kb: int = 64
    """Of standard output in KiB, and as much of standard error; code that prints more is stopped."""
    parallel: int = 16
    """Runs at once; others wait their turn, and their time does not count."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"SandboxLimits.{name} must be more than 0, not {value!r}")


@dataclass(frozen=True, kw_only=True)
class CodeResult:
    """What a run of code came to."""

    stdout: str
    """What it printed, at most `SandboxLimits.output_kb`; bytes that are no UTF-8 are replaced."""
    stderr: str
    """Likewise; with a traceback where the code failed, and a line that says why it was stopped where it was."""
    returncode: int
    """As a Python script's: 0, what ``sys.exit`` was given, 1 after an exception. -1: the sandbox stopped it. Another
    negative number: a signal ended it."""
    outcome: Outcome
    """``finished``: it ended by itself, well or badly. ``killed``: a signal that is not the sandbox's. Else the limit
    that it ran into."""
    seconds: float
    """Wall time, from the request to the last of its output."""


class PythonSandbox:
    """Runs code; starts its zygote with the first run.

    :param require: refuse to run anything where the system cannot confine a process wholly. Otherwise one warning
        says what is missing, and the code runs with what there is.
    """

    def __init__(self, limits: SandboxLimits | None = None, require: bool = False) -> None:
        self.limits = limits or SandboxLimits()
        self.require = require
        self.level: Level | None = None
        """What the system grants; known after the first run."""
        spec = ZygoteSpec(
            python=sys.executable,
            main="astuner_sandbox.child:main",
            preload=("astuner_sandbox.child:warm",),
            environ={"HOME": "/", "TMPDIR": "/", "LANG": "C.UTF-8", **_ONE_THREAD_EACH},
        )
        self._zygote = Keeper(spec, _START_WITHIN)
        self._scratch: Root | None = None
        self._closed = False
        self._lock = threading.Lock()  # of the two above
        self._places = threading.BoundedSemaphore(self.limits.parallel)
        self._process = os.getpid()

    def run(self, code: str, timeout: float | None = None) -> CodeResult:
        """Run a script and wait for its end.

        :param timeout: seconds, at most `SandboxLimits.seconds`.
        :raises SandboxFailed: the sandbox broke, or is closed; says nothing about the code.
        :raises NotConfined: ``require``, and the system lacks something.
        :raises ValueError: the timeout is no positive number.
        """
        return self._run(code, self._seconds(timeout), threading.Event())

    async def run_async(self, code: str, timeout: float | None = None) -> CodeResult:
        """`run`, beside the event loop; cancelling it stops the code."""
        seconds, cancelled = self._seconds(timeout), threading.Event()
        try:
            return await in_daemon_thread(self._run, code, seconds, cancelled, name="astuner-sandbox")
        finally:
            cancelled.set()

    @property
    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Stop what runs and remove everything; harmless when done already."""
        if self._process != os.getpid():  # a fork of the process that it belongs to
            return
        with self._lock:
            self._closed = True
            scratch, self._scratch = self._scratch, None
        self._zygote.close()
        if scratch is not None:
            for _ in range(self.limits.parallel):  # until the last run has removed what is its own
                self._places.acquire()
            scratch.close()
            self._places.release(self.limits.parallel)

    def __enter__(self) -> PythonSandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _seconds(self, timeout: float | None) -> float:
        if timeout is None:
            return self.limits.seconds
        if not (math.isfinite(timeout) and timeout > 0):
            raise ValueError(f"the timeout must be a positive number of seconds, not {timeout!r}")
        return min(float(timeout), self.limits.seconds)

    def _run(self, code: str, seconds: float, cancelled: threading.Event) -> CodeResult:
        started = time.monotonic()
        with self._places:
            for last in (False, True):
                if cancelled.is_set():
                    raise SandboxFailed("nobody waits for the result any more")
                try:
                    zygote, scratch = self._ready()
                    folder = scratch.new()
                    try:
                        return self._once(zygote, folder, code, seconds, cancelled, started)
                    finally:
                        clear(folder)  # code that makes that hard does not lose its own result by it
                except (ZygoteFailed, EOFError, OSError) as e:  # no process, no descriptor, no space, no answer
                    self._check_open()
                    if last:
                        raise SandboxFailed(f"the Python sandbox broke twice while it ran a script: {e}") from None
        raise AssertionError("the loop above returns or raises")

    def _once(
        self, zygote: Zygote, folder: Path, code: str, seconds: float, cancelled: threading.Event, started: float
    ) -> CodeResult:
        with contextlib.ExitStack() as stack:
            (out, out_end), (err, err_end) = _pipe(stack), _pipe(stack)
            fork = zygote.fork(self._options(folder), output=(out_end.fileno(), err_end.fileno()))
            channel = Channel(fork.socket)
            stack.callback(channel.close)
            stack.callback(fork.wait, _GONE_WITHIN)  # gone before its folder is removed; mostly it has ended already
            stack.callback(fork.kill)
            out_end.close()
            err_end.close()
            watch = Watch(fork, (out.fileno(), err.fileno()), folder, self.limits, cancelled)
            try:
                channel.send({"code": code}, timeout=_START_WITHIN)
                self._learn(channel.recv(_START_WITHIN))
            except EOFError:  # it ended before the code began
                watch.until_the_end(_START_WITHIN)
                raise ZygoteFailed(f"its process ended at once ({fork.ended})\n{watch.text(err)}".strip()) from None
            stopped = watch.until_the_end(seconds)
            if fork.returncode is None:
                raise ZygoteFailed(str(fork.ended))
            natural: Outcome = "finished" if fork.returncode >= 0 else "killed"
            if fork.returncode == -signal.SIGKILL and fork.cpu_s > self.limits.cpu_seconds - 0.5:
                natural = "cpu"  # the kernel's own limit, which is not watched from here
            outcome = stopped or natural
            stdout, stderr = watch.text(out), watch.text(err)
        if outcome in _REASONS:
            reason = _REASONS[outcome].format(**{**asdict(self.limits), "seconds": seconds})
            stderr += ("\n" if stderr and not stderr.endswith("\n") else "") + reason
        return CodeResult(
            stdout=stdout,
            stderr=stderr,
            returncode=-1 if outcome in _REASONS else fork.returncode,
            outcome=outcome,
            seconds=time.monotonic() - started,
        )

    def _options(self, folder: Path) -> dict[str, Any]:
        confinement = Confinement(
            read=readable(),
            write=(str(folder), os.devnull),
            cpu_s=self.limits.cpu_seconds,
            memory_mb=self.limits.memory_mb,
            file_mb=self.limits.file_mb,
            open_files=self.limits.open_files,
        )
        here = {"HOME": str(folder), "TMPDIR": str(folder)}
        environ = {"PATH": os.defpath, "LANG": "C.UTF-8", **_ONE_THREAD_EACH, **here}
        return {
            "folder": str(folder),
            "environ": environ,
            "confinement": asdict(confinement),
            "require": self.require,
        }

    def _learn(self, answer: dict[str, Any]) -> None:
        if "refused" in answer:
            raise NotConfined(answer["refused"])
        self.level = Level.from_json(answer["level"])
        if self.level.missing and self.level.missing not in _said:
            _said.add(self.level.missing)
            lines = "".join(f"\n- {line}" for line in self.level.missing)
            logging.getLogger(__name__).warning(
                "Python code that the model writes is not wholly contained on this system; run it in a container. "
                "What is missing:%s",
                lines,
            )

    def _ready(self) -> tuple[Zygote, Root]:
        with self._lock:
            self._check_open()
            if self._scratch is None:
                self._scratch = Root("astuner-sandbox-")
            scratch = self._scratch
        try:
            return self._zygote.ready(), scratch
        except ZygoteFailed as e:
            self._check_open()
            raise SandboxFailed(f"the Python sandbox does not start: {e}") from None

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxFailed("the Python sandbox was closed")


def _pipe(stack: contextlib.ExitStack) -> tuple[io.FileIO, io.FileIO]:
    """Its reading and its writing end; both are closed with the stack at the latest."""
    reading, writing = os.pipe()
    return stack.enter_context(io.FileIO(reading)), stack.enter_context(io.FileIO(writing, "w"))


class Watch:
    """One run, watched from outside: collects what it prints, and stops it at a limit.

    Made when its process is about to start the code, which cannot be trusted to say anything: that it has ended is what
    the kernel told the zygote.

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
                size, files = usage(self.folder, most=self.limits.files)
                if size > self.limits.disk_mb << 20 or files > self.limits.files:
                    return "disk"
                if number(self.fork.pid, THREADS) > self.limits.threads:
                    return "threads"
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


def usage(folder: Path, *, most: int) -> tuple[int, int]:
    """Bytes on disk and entries below a folder, while somebody is writing there; counting ends at ``most`` entries.

    What cannot be looked at, because its path is too long, counts as too many.
    """
    size, entries, left = 0, 0, [str(folder)]
    while left and entries <= most:
        try:
            with os.scandir(left.pop()) as found:
                for entry in found:
                    entries += 1
                    status = entry.stat(follow_symlinks=False)
                    size += status.st_blocks * 512
                    if stat.S_ISDIR(status.st_mode):
                        left.append(entry.path)
                    if entries > most:
                        break
        except (FileNotFoundError, NotADirectoryError):
            continue  # gone again
        except OSError:
            return size, most + 1
    return size, entries


_shared: dict[int, PythonSandbox] = {}
"""By process: a forked child makes one of its own, and closes nothing of its parent's by forgetting it."""


def shared() -> PythonSandbox:
    """The sandbox of this process, with the usual limits; closed when the process ends."""
    own = _shared.get(os.getpid()) or _shared.setdefault(os.getpid(), PythonSandbox())
    if own.is_closed:
        own = _shared[os.getpid()] = PythonSandbox()
    return own


@atexit.register
def _close() -> None:
    if (own := _shared.get(os.getpid())) is not None:
        own.close()
