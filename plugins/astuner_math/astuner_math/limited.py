"""A few warm, limited child processes that compare two answers as mathematics.

Each child has its own thread here, is started when first needed and then kept: a comparison costs its algebra,
not a process.  What a model writes can exhaust a child but nothing else: CPU time and memory of a child are
bounded by the kernel, it starts with an empty environment, and it is replaced when it dies.

Who is to blame decides what a death means.  The child says when it has read the reference; dying after that, out
of CPU time or twice in a row, is the candidate's doing and a wrong answer.  Everything else (no child can be
started, the reference kills it, the machine is too slow to give it its CPU time) is infrastructure: `JudgeFailed`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from astuner.contracts.errors import JudgeFailed

_SCRIPT = Path(__file__).with_name("worker.py")
_KEPT = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT")  # what some Pythons need to start at all
_START_SECONDS = 60.0
_WALL_PER_CPU_SECOND = 10.0
_OUT_OF_CPU_TIME = "SIGPROF"  # what the worker's timer ends it with


@dataclass(frozen=True)
class Comparison:
    """What the limited process found."""

    equal: bool
    timeout: bool = False
    """The candidate used up its CPU time, or took the process down with it."""
    error: str = ""
    """Why the candidate could not be compared, by the name of the exception; empty when it could."""


class _Died(Exception):
    """A child ended in the middle of a question."""

    def __init__(self, status: str, reference_read: bool) -> None:
        super().__init__(status)
        self.status = status
        self.reference_read = reference_read


class LimitedEquality:
    """Compares answers in limited child processes; safe to call from any thread, and picklable.

    :param processes: how many children at most.
    :param cpu_seconds: CPU time one comparison may use.
    :param memory_bytes: address space of a child (enforced on Linux).
    """

    def __init__(self, processes: int = 2, cpu_seconds: float = 5.0, memory_bytes: int = 1 << 30) -> None:
        self._arguments = (processes, cpu_seconds, memory_bytes)
        self._cpu_seconds = cpu_seconds
        self._memory_bytes = memory_bytes
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="astuner-math")
        self._own = threading.local()
        self._children: set[_Child] = set()
        self._close = weakref.finalize(self, _close, self._threads, self._children)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._arguments

    @property
    def children(self) -> tuple[int, ...]:
        """The process ids of the children."""
        return tuple(child.pid for child in self._children)

    def submit(self, reference: str, candidate: str) -> Future[Comparison]:
        """Compare two normalised answers; the future raises `JudgeFailed` when there is no verdict."""
        return self._threads.submit(self._compare, reference, candidate)

    def close(self) -> None:
        """End the children; also done when this object goes away and at interpreter exit."""
        self._close()

    def _compare(self, reference: str, candidate: str) -> Comparison:
        for is_last in (False, True):  # twice: something else may have killed it, such as a system short of memory
            try:
                return self._attempt(reference, candidate)
            except _Died as death:
                if not is_last and death.status != _OUT_OF_CPU_TIME:
                    continue
                if death.reference_read:
                    return Comparison(equal=False, timeout=True, error=death.status)
                told = f"reading the reference {_short(reference)} ended its process ({death.status})"
                raise JudgeFailed(told) from None
        raise AssertionError("the second attempt returns or raises")

    def _attempt(self, reference: str, candidate: str) -> Comparison:
        child = self._child()
        reference_read = False
        wall_seconds = self._cpu_seconds * _WALL_PER_CPU_SECOND
        try:
            child.send({"reference": reference, "candidate": candidate})
            deadline = time.monotonic() + wall_seconds
            if unreadable := child.receive(deadline)["reference"]:
                raise JudgeFailed(f"the reference {_short(reference)} cannot be read as mathematics ({unreadable})")
            reference_read = True
            verdict = child.receive(deadline)
            return Comparison(equal=verdict["equal"], error=verdict.get("error", ""))
        except TimeoutError:
            self._discard(child, kill=True)
            raise JudgeFailed(
                f"comparing {_short(candidate)} with {_short(reference)} got less than {self._cpu_seconds:g} s of CPU "
                f"time in {wall_seconds:g} s: the machine is overloaded; lower rollout.max_env_worker"
            ) from None
        except (EOFError, ConnectionError):
            raise _Died(self._discard(child), reference_read) from None

    def _child(self) -> _Child:
        child: _Child | None = getattr(self._own, "child", None)
        if child is None:
            if not self._close.alive:
                raise JudgeFailed("the judge was closed while this comparison waited")
            child = self._own.child = _Child(self._cpu_seconds, self._memory_bytes)
            self._children.add(child)
        return child

    def _discard(self, child: _Child, *, kill: bool = False) -> str:
        self._children.discard(child)
        self._own.child = None
        return child.end(kill=kill)


class _Child:
    """One worker process and the pipe to it."""

    def __init__(self, cpu_seconds: float, memory_bytes: int) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-B", str(_SCRIPT), str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    env={name: os.environ[name] for name in _KEPT if name in os.environ},
                    cwd=os.sep,
                    start_new_session=True,  # Ctrl-C is for the run, which ends its children itself
                )
            except OSError as e:
                self._pipe.close()
                raise JudgeFailed(f"cannot start a process to compare answers in: {e}") from e
        self.pid = self._process.pid
        setup = {
            "sys_path": [os.path.abspath(path) for path in sys.path],
            "cpu_seconds": cpu_seconds,
            "memory_bytes": memory_bytes,
        }
        try:
            self.send(setup)
            said = self.receive(time.monotonic() + _START_SECONDS)
        except (EOFError, OSError) as e:
            said = {"failed": f"{type(e).__name__}, {self.end(kill=True)}"}
        if reason := said.get("failed"):
            self.end()
            raise JudgeFailed(
                f"the process that compares answers does not start ({reason}); "
                "try: pip install --force-reinstall astuner-math"
            )

    def send(self, frame: Any) -> None:
        self._pipe.send_bytes(json.dumps(frame).encode())

    def receive(self, deadline: float) -> Any:
        """The next frame.

        :param deadline: on the clock of `time.monotonic`.
        :raises TimeoutError: nothing came by then.
        :raises EOFError, ConnectionError: the child is gone.
        """
        if not self._pipe.poll(max(0.0, deadline - time.monotonic())):
            raise TimeoutError
        return json.loads(self._pipe.recv_bytes())

    def end(self, *, kill: bool = False) -> str:
        """Its exit status or the name of the signal that ended it; ``kill`` ends it if it still runs."""
        if kill:
            self._process.kill()
        code = self._process.wait()
        self._pipe.close()
        return signal.Signals(-code).name if code < 0 else f"exit status {code}"


def _close(threads: ThreadPoolExecutor, children: set[_Child]) -> None:
    threads.shutdown(wait=False, cancel_futures=True)
    for child in list(children):
        child.end(kill=True)
    children.clear()


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
