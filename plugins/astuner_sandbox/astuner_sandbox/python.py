"""A warm Python sandbox: one forked, confined process per run of code.

The zygote has the usual modules imported, so a run costs milliseconds.  Two runs share nothing that either can write.
A zygote that was killed is replaced, and the run repeated once: the code that was running cannot have changed
anything.  Safe to use from several threads and event loops at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import math
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from astuner_sandbox.isolation.channel import Channel
from astuner_sandbox.isolation.confine import Confinement, Level, NotConfined
from astuner_sandbox.isolation.scratch import remove
from astuner_sandbox.isolation.zygotes import Fork, Zygote, ZygoteFailed, ZygoteSpec
from astuner_sandbox.places import DEVICES_TO_WRITE, readable
from astuner_sandbox.result import CodeResult, Outcome, SandboxFailed, SandboxLimits
from astuner_sandbox.scratch import Scratch
from astuner_sandbox.watch import Watch

_START_WITHIN = 60.0
_GONE_WITHIN = 10.0
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
        self._preload: tuple[str, ...] = ("astuner_sandbox.child:warm",)
        self._zygote: Zygote | None = None
        self._scratch: Scratch | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False
        self._lock = threading.Lock()  # of the four above
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
        with self._lock:
            self._check_open()
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.limits.parallel, thread_name_prefix="astuner-sandbox")
            done = self._pool.submit(self._run, code, seconds, cancelled)
        try:
            return await asyncio.wrap_future(done)
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
            zygote, scratch, pool = self._zygote, self._scratch, self._pool
            self._zygote = self._scratch = self._pool = None
        if zygote is not None:
            zygote.close()
        if pool is not None:
            pool.shutdown(cancel_futures=True)
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
                try:
                    zygote, scratch = self._ready()
                    folder = scratch.new()
                    try:
                        return self._once(zygote, folder, code, seconds, cancelled, started)
                    finally:
                        _clear(folder)
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
            stack.callback(_end, fork)
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
            outcome = stopped or self._natural(fork)
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

    def _natural(self, fork: Fork) -> Outcome:
        """How it ended where no limit that is watched from here stopped it."""
        assert fork.returncode is not None
        if fork.returncode == -signal.SIGKILL and fork.cpu_s > self.limits.cpu_seconds - 0.5:
            return "cpu"
        return "finished" if fork.returncode >= 0 else "killed"

    def _options(self, folder: Path) -> dict[str, Any]:
        confinement = Confinement(
            read=readable(),
            write=(str(folder), *DEVICES_TO_WRITE),
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

    def _ready(self) -> tuple[Zygote, Scratch]:
        with self._lock:
            self._check_open()
            if self._scratch is None:
                self._scratch = Scratch()
            if self._zygote is None or not self._zygote.is_alive:
                if self._zygote is not None:
                    self._zygote.close()
                spec = ZygoteSpec(
                    python=sys.executable,
                    main="astuner_sandbox.child:main",
                    preload=self._preload,
                    environ={"HOME": "/", "TMPDIR": "/", "LANG": "C.UTF-8", **_ONE_THREAD_EACH},
                )
                self._zygote = Zygote(spec)
                try:
                    self._zygote.start(_START_WITHIN)
                except ZygoteFailed as e:
                    raise SandboxFailed(f"the Python sandbox does not start: {e}") from None
            return self._zygote, self._scratch

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxFailed("the Python sandbox was closed")


def _clear(folder: Path) -> None:
    """Remove it if that can be done: code that makes its folder hard to remove must not lose its own result by that."""
    try:
        remove(folder)
    except OSError as e:
        logging.getLogger(__name__).warning("the scratch folder %s is left until the end: %s", folder, e)


def _pipe(stack: contextlib.ExitStack) -> tuple[io.FileIO, io.FileIO]:
    """Its reading and its writing end; both are closed with the stack at the latest."""
    reading, writing = os.pipe()
    return stack.enter_context(io.FileIO(reading)), stack.enter_context(io.FileIO(writing, "w"))


def _end(fork: Fork) -> None:
    """Have it gone before its folder is removed; mostly it has ended already."""
    fork.kill()
    fork.wait(_GONE_WITHIN)
