"""Compare two answers symbolically in a few warm, limited child processes.

Each child has its own thread here, starts on first use and stays alive, so a comparison does not pay for a new process.
Answers of a model can exhaust only a child: the kernel limits its CPU time and memory, its environment is empty, and it
is replaced when it dies.

The cause decides the meaning of a death. A child reports when it has parsed the reference. If it dies after that, by
CPU time or twice in a row, the candidate is the cause and the answer is wrong. All other failures (no child can be
started, the reference kills it, the machine is too slow) are infrastructure failures: `JudgeFailed`.
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
_KEPT = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT")  # required to start some Python builds
_START_SECONDS = 60.0
_WALL_PER_CPU_SECOND = 10.0
_OUT_OF_CPU_TIME = "SIGPROF"  # signal of the worker's CPU timer


@dataclass(frozen=True)
class Comparison:
    """Result of the limited process."""

    equal: bool
    timeout: bool = False
    """Whether the candidate exceeded the CPU time or ended the process."""
    error: str = ""
    """Name of the exception if the candidate could not be compared, else empty."""


class _Died(Exception):
    """Raised if a child ends during a comparison."""

    def __init__(self, status: str, reference_read: bool) -> None:
        super().__init__(status)
        self.status = status
        self.reference_read = reference_read


class LimitedEquality:
    """Pool of limited child processes that compare answers; thread-safe and picklable.

    :param processes: Maximum number of children.
    :param cpu_seconds: CPU time limit of one comparison.
    :param memory_bytes: Address space limit of a child (enforced on Linux).
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
        """Process IDs of the children."""
        return tuple(child.pid for child in self._children)

    def submit(self, reference: str, candidate: str) -> Future[Comparison]:
        """Compare two normalized answers; the future raises `JudgeFailed` without a verdict."""
        return self._threads.submit(self._compare, reference, candidate)

    def close(self) -> None:
        """End the children; also called when this object is deleted and at interpreter exit."""
        self._close()

    def _compare(self, reference: str, candidate: str) -> Comparison:
        for is_last in (False, True):  # twice: another cause may have killed the child, such as low memory
            try:
                return self._attempt(reference, candidate)
            except _Died as death:
                if not is_last and death.status != _OUT_OF_CPU_TIME:
                    continue
                if death.reference_read:
                    return Comparison(equal=False, timeout=True, error=death.status)
                told = f"parsing the reference {_short(reference)} ended the process ({death.status})"
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
                f"The machine is overloaded: comparing {_short(candidate)} with {_short(reference)} got less than "
                f"{self._cpu_seconds:g} s of CPU time in {wall_seconds:g} s. Lower rollout.max_env_worker."
            ) from None
        except (EOFError, ConnectionError):
            raise _Died(self._discard(child), reference_read) from None

    def _child(self) -> _Child:
        child: _Child | None = getattr(self._own, "child", None)
        if child is None:
            if not self._close.alive:
                raise JudgeFailed("the judge was closed while this comparison was waiting")
            child = self._own.child = _Child(self._cpu_seconds, self._memory_bytes)
            self._children.add(child)
        return child

    def _discard(self, child: _Child, *, kill: bool = False) -> str:
        self._children.discard(child)
        self._own.child = None
        return child.end(kill=kill)


class _Child:
    """Worker process and the pipe to it."""

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
                    start_new_session=True,  # Ctrl-C goes to the run, which ends its children
                )
            except OSError as e:
                self._pipe.close()
                raise JudgeFailed(f"could not start a process for comparing answers: {e}") from e
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
                f"The process for comparing answers did not start ({reason}). "
                "Try: pip install --force-reinstall astuner-math"
            )

    def send(self, frame: Any) -> None:
        self._pipe.send_bytes(json.dumps(frame).encode())

    def receive(self, deadline: float) -> Any:
        """Return the next message.

        :param deadline: Time on the clock of `time.monotonic`.
        :raises TimeoutError: No message before the deadline.
        :raises EOFError, ConnectionError: The child is gone.
        """
        if not self._pipe.poll(max(0.0, deadline - time.monotonic())):
            raise TimeoutError
        return json.loads(self._pipe.recv_bytes())

    def end(self, *, kill: bool = False) -> str:
        """Wait for the process and return its exit status or signal name; ``kill`` ends it first."""
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
