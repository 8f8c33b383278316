"""Run Python code in a warm sandbox: one forked, confined process per run.

The zygote has imported common modules, so a run starts in milliseconds. Two runs share nothing that either can write.
If the zygote was killed, it is replaced and the run is repeated once, because interrupted code cannot have had effects.
All methods can be called from several threads and event loops.
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
"""Seconds between two checks of resources that the system does not report."""
_REASONS: dict[Outcome, str] = {
    "timeout": "TimeoutError: stopped after {seconds:g} seconds.",
    "cpu": "TimeoutError: stopped after {cpu_seconds} seconds of processor time.",
    "output": "Stopped: it printed more than {output_kb} KiB.",
    "disk": "Stopped: it wrote more than {disk_mb} MiB or {files} files.",
    "threads": "Stopped: it started more than {threads} threads.",
}
_ONE_THREAD_EACH = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL", "NUMEXPR")}
_said: set[tuple[str, ...]] = set()
"""Warnings that this process has already logged."""


class SandboxFailed(EnvironmentFailed):
    """The sandbox itself failed, independently of the code."""


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """Limits of one run. Code beyond a limit is stopped or gets an ordinary exception."""

    seconds: float = 300
    """Wall-clock seconds; a run may request less, never more."""
    cpu_seconds: int = 60
    """Seconds of processor time, all threads together."""
    memory_mb: int = 1024
    """Address space in MiB, including about 40 of the interpreter; larger allocations raise MemoryError."""
    file_mb: int = 16
    """Maximum size of a file in MiB; further writes fail."""
    disk_mb: int = 64
    """Maximum size of all files of a run in MiB, checked twenty times per second."""
    files: int = 2000
    """Maximum number of files and directories of a run, checked twenty times per second."""
    open_files: int = 64
    threads: int = 64
    """Maximum number of threads, checked twenty times per second."""
    output_kb: int = 64
    """Maximum KiB of standard output and of standard error; code that prints more is stopped."""
    parallel: int = 16
    """Maximum concurrent runs; others wait, which does not count toward their time."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"SandboxLimits.{name} must be more than 0, not {value!r}")


@dataclass(frozen=True, kw_only=True)
class CodeResult:
    """Result of a run."""

    stdout: str
    """Standard output, up to `SandboxLimits.output_kb`; invalid UTF-8 is replaced."""
    stderr: str
    """Standard error, with a traceback if the code failed and a line with the reason if it was stopped."""
    returncode: int
    """Exit code as of a Python script: 0, the argument of ``sys.exit``, or 1 after an exception. -1 if the sandbox
    stopped it; another negative number if a signal ended it."""
    outcome: Outcome
    """``finished`` if the code ended by itself; ``killed`` if a signal from outside of the sandbox ended it; otherwise
    the limit that it exceeded."""
    seconds: float
    """Wall-clock seconds from the request to the end of its output."""


class PythonSandbox:
    """Run code; the first run starts the zygote.

    :param require: Raise if the system cannot confine a process completely. Otherwise one warning lists what is
        missing, and the code runs with the available protection.
    """

    def __init__(self, limits: SandboxLimits | None = None, require: bool = False) -> None:
        self.limits = limits or SandboxLimits()
        self.require = require
        self.level: Level | None = None
        """Protection that the system grants; known after the first run."""
        spec = ZygoteSpec(
            python=sys.executable,
            main="astuner_sandbox.child:main",
            preload=("astuner_sandbox.child:warm",),
            environ={"HOME": "/", "TMPDIR": "/", "LANG": "C.UTF-8", **_ONE_THREAD_EACH},
        )
        self._zygote = Keeper(spec, _START_WITHIN)
        self._scratch: Root | None = None
        self._closed = False
        self._lock = threading.Lock()  # guards the two attributes above
        self._places = threading.BoundedSemaphore(self.limits.parallel)
        self._process = os.getpid()

    def run(self, code: str, timeout: float | None = None) -> CodeResult:
        """Run a script and wait for its end.

        :param timeout: Seconds, at most `SandboxLimits.seconds`.
        :raises SandboxFailed: The sandbox failed, independently of the code, or is closed.
        :raises NotConfined: ``require`` is set and the system lacks protection.
        :raises ValueError: The timeout is not a positive number.
        """
        return self._run(code, self._seconds(timeout), threading.Event())

    async def run_async(self, code: str, timeout: float | None = None) -> CodeResult:
        """Run a script without blocking the event loop; canceling stops the code."""
        seconds, cancelled = self._seconds(timeout), threading.Event()
        try:
            return await in_daemon_thread(self._run, code, seconds, cancelled, name="astuner-sandbox")
        finally:
            cancelled.set()

    @property
    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Stop all runs and remove their files. Can be called repeatedly."""
        if self._process != os.getpid():  # in a fork of the process that owns the sandbox
            return
        with self._lock:
            self._closed = True
            scratch, self._scratch = self._scratch, None
        self._zygote.close()
        if scratch is not None:
            for _ in range(self.limits.parallel):  # until the last run has removed its files
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
                    raise SandboxFailed("the run was canceled")
                try:
                    zygote, scratch = self._ready()
                    folder = scratch.new()
                    try:
                        return self._once(zygote, folder, code, seconds, cancelled, started)
                    finally:
                        clear(folder)  # code that makes removal difficult still gets its result
                except (ZygoteFailed, EOFError, OSError) as e:  # no process, descriptor, space or answer
                    self._check_open()
                    if last:
                        raise SandboxFailed(f"the Python sandbox failed twice during one script: {e}") from None
        raise AssertionError("the loop above returns or raises")

    def _once(
        self, zygote: Zygote, folder: Path, code: str, seconds: float, cancelled: threading.Event, started: float
    ) -> CodeResult:
        with contextlib.ExitStack() as stack:
            (out, out_end), (err, err_end) = _pipe(stack), _pipe(stack)
            fork = zygote.fork(self._options(folder), output=(out_end.fileno(), err_end.fileno()))
            channel = Channel(fork.socket)
            stack.callback(channel.close)
            # ensures that it is gone before its directory is removed; usually it has already ended
            stack.callback(fork.wait, _GONE_WITHIN)
            stack.callback(fork.kill)
            out_end.close()
            err_end.close()
            watch = Watch(fork, (out.fileno(), err.fileno()), folder, self.limits, cancelled)
            try:
                channel.send({"code": code}, timeout=_START_WITHIN)
                self._learn(channel.recv(_START_WITHIN))
            except EOFError:  # it ended before the code started
                watch.until_the_end(_START_WITHIN)
                raise ZygoteFailed(f"its process ended immediately ({fork.ended})\n{watch.text(err)}".strip()) from None
            stopped = watch.until_the_end(seconds)
            if fork.returncode is None:
                raise ZygoteFailed(str(fork.ended))
            natural: Outcome = "finished" if fork.returncode >= 0 else "killed"
            if fork.returncode == -signal.SIGKILL and fork.cpu_s > self.limits.cpu_seconds - 0.5:
                natural = "cpu"  # the kernel's own limit, which is not checked here
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
                "this system cannot fully isolate Python code that the model writes. Run ASTuner in a container. "
                "Missing protection:%s",
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
            raise SandboxFailed(f"the Python sandbox did not start: {e}") from None

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxFailed("the Python sandbox was closed")


def _pipe(stack: contextlib.ExitStack) -> tuple[io.FileIO, io.FileIO]:
    """Return the reading and writing end of a pipe, which the stack closes."""
    reading, writing = os.pipe()
    return stack.enter_context(io.FileIO(reading)), stack.enter_context(io.FileIO(writing, "w"))


class Watch:
    """Monitor one run from outside: collect its output and stop it at a limit.

    It is created just before the code starts. The code cannot be trusted to report anything; the kernel reports its end
    to the zygote.

    :param output: Reading ends of its standard output and error.
    :param cancelled: Set when the result is no longer needed.
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
        """Wait for the end of the run; return the limit that stopped it, or None if it ended by itself.

        :raises SandboxFailed: It cannot be killed.
        """
        stopped = self._stopped_by(time.monotonic() + seconds)
        if stopped is not None:
            self.fork.kill()
            if self.fork.wait(_GONE_WITHIN) is None:
                raise SandboxFailed(f"process {self.fork.pid} of the sandbox does not end. Check what it waits for")
        too_much = self._read()
        return "output" if too_much and stopped is None else stopped

    def text(self, descriptor: io.FileIO) -> str:
        """Return the collected output of a descriptor."""
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
        """Read available output; return whether it exceeds the limit."""
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
    """Return the bytes on disk and the entries below a directory during writes; stop counting at ``most`` entries.

    A path that is too long to be read counts as too many entries.
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
            continue  # removed in the meantime
        except OSError:
            return size, most + 1
    return size, entries


_shared: dict[int, PythonSandbox] = {}
"""Sandbox by process ID: a forked child creates its own and does not close its parent's."""


def shared() -> PythonSandbox:
    """Return the sandbox of this process, with default limits; it closes when the process ends."""
    own = _shared.get(os.getpid()) or _shared.setdefault(os.getpid(), PythonSandbox())
    if own.is_closed:
        own = _shared[os.getpid()] = PythonSandbox()
    return own


@atexit.register
def _close() -> None:
    if (own := _shared.get(os.getpid())) is not None:
        own.close()
