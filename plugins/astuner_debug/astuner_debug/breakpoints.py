"""``--db TAG|TAG``: activate breakpoints by tag, stop at them, and report stops in workers.

A breakpoint opens pdb if the process is on a terminal, otherwise debugpy.  debugpy listens on loopback, on its own free
port for each process, and only from the first stop on: its protocol has no password, so anyone who connects can run
code as this user.  Invariant: the address is reported before the process starts to wait for a debugger.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import pdb
import re
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from types import FrameType
from typing import TYPE_CHECKING

from astuner.contracts.errors import ConfigError
from astuner.contracts.interrupt import Interrupt
from astuner.contracts.parts import AT_LEISURE, DebuggerPart
from astuner.contracts.service import variables_set

if TYPE_CHECKING:
    from astuner.contracts.backbone import Backbone

TAGS_VARIABLE = "ASTUNER_DEBUG_TAGS"
"""Active tags, joined by ``|``; `astuner.bp` reads this variable in every process of the run."""
RUN_VARIABLE = "ASTUNER_DEBUG_RUN"
"""ID of the run to which a Ray worker reports a stop."""
NAMESPACE = b"astuner-breakpoints"
"""Namespace in Ray's key-value store through which workers report stops to the run."""
LOOPBACK = "127.0.0.1"
_TAG = re.compile(r"[\w.-]+")
_LONGEST = 86400.0
"""Seconds to wait for a debugger; equal to the time limits of episodes under ``--db``."""
_LOOK = 0.5
"""Seconds between polls for reports from workers."""

_current: Breakpoints | None = None
"""Breakpoints of the run in this process, if any."""
_lock = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class Stop:
    """A process that stopped at a breakpoint."""

    tag: str
    place: str
    """``file:line``."""
    pid: int
    host: str
    port: int | None = None
    """Port on the loopback of ``host`` where debugpy listens; None if pdb runs on the run's terminal."""

    def __str__(self) -> str:
        at = f"breakpoint {self.tag} at {self.place}"
        if self.port is None:
            return f"{at}: type n for the next line, c to continue, q to fail this episode, h for help"
        there = self.host != socket.gethostname()
        forward = f" (first: ssh -L {self.port}:{LOOPBACK}:{self.port} {self.host})" if there else ""
        return (
            f"{at} in process {self.pid} on {self.host} waits for a debugger at {LOOPBACK}:{self.port}{forward}; in VS "
            f"Code: Run and Debug, Python Debugger, Remote Attach, {LOOPBACK}, {self.port} (docs/debugging.md)"
        )


class Breakpoints(DebuggerPart):
    """Breakpoints of one command.

    Debugging takes longer than normal time limits allow, and is easiest with one episode.  The time limits of episodes,
    judges and environments are one day, and one episode runs at a time, unless the command line overrides them.
    """

    overrides = AT_LEISURE

    def __init__(self, tags: Sequence[str], *, listen: bool = False) -> None:
        self.tags = tuple(dict.fromkeys(tag.strip() for text in tags for tag in re.split(r"[|,]", text)))
        if "" in self.tags:
            raise ConfigError('--db has an empty tag; write --db \'TAG1|TAG2\' for bp("TAG1") and bp("TAG2")')
        if wrong := next((tag for tag in self.tags if not _TAG.fullmatch(tag)), None):
            raise ConfigError(f"{wrong!r} is not a valid tag: use letters, digits, _ . - and separate tags with |")
        if not self.tags:
            raise ConfigError("--db-listen has no effect without breakpoints; add --db TAG")
        self.note = _to_stderr
        self.listen = listen
        self._run, self._pid = uuid.uuid4().hex, os.getpid()
        self._reached: set[str] = set()

    def check(self, backbone: Backbone) -> str:
        if backbone.lends:
            raise ConfigError("--db works only in the command that owns the run; remove it from this command")
        return (
            f"breakpoints: {', '.join(self.tags)}; time limits are one day and one episode runs at a time, unless the "
            "command line overrides them (astuner.rollout.max_env_worker=N)"
        )

    @contextmanager
    def active(self) -> Iterator[None]:
        global _current
        _current = self
        try:
            with variables_set({TAGS_VARIABLE: "|".join(self.tags), RUN_VARIABLE: self._run}):
                yield
        finally:
            _current = None

    def hear(self, stop: Stop) -> None:
        """Report that a process stopped at a breakpoint."""
        self._reached.add(stop.tag)
        (self.note if os.getpid() == self._pid else _to_stderr)(str(stop))  # a fork cannot write to the run's log

    def end(self) -> None:
        if missed := [tag for tag in self.tags if tag not in self._reached]:
            calls = ", ".join(f'bp("{tag}")' for tag in missed)
            self.note(f"breakpoints never reached: {calls}; check the spelling and that this code runs")

    @staticmethod
    def stop(tag: str, frame: FrameType) -> None:
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        here = Stop(tag=tag, place=place, pid=os.getpid(), host=socket.gethostname())
        if on_terminal() and not (_current is not None and _current.listen):
            _say(here)
            pdb.Pdb().set_trace(frame)
            return
        with _lock:  # two threads may reach breakpoints at the same time
            port = _listening()
        _say(replace(here, port=port))
        import pydevd  # debugpy's own, importable since it listens

        if not _somebody_came():
            (_current.note if _current else _to_stderr)(f"no debugger connected to breakpoint {tag}; continuing")
            return
        # as in `debugpy.breakpoint`, which can only stop in the frame that calls it
        pydevd.settrace(suspend=True, trace_only_current_thread=True, patch_multiprocessing=False, stop_at_frame=frame)

    @staticmethod
    @contextmanager
    def hearing_workers() -> Iterator[None]:
        if _current is None:
            yield
            return
        over = threading.Event()
        ears = threading.Thread(target=_hear, args=(_current, over), name="astuner breakpoints", daemon=True)
        ears.start()
        try:
            yield
        finally:
            over.set()
            ears.join()


def on_terminal() -> bool:
    """Return whether this process runs on a terminal and is not a child of multiprocessing."""
    return multiprocessing.parent_process() is None and sys.stdin.isatty() and sys.stdout.isatty()


@functools.lru_cache(maxsize=1)
def _listening() -> int:
    """Start debugpy if needed and return its port; debugpy can listen only once per process."""
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # no warning about frozen modules
    import debugpy

    debugpy.configure(subProcess=False)  # do not debug processes that an agent starts
    port: int = debugpy.listen((LOOPBACK, 0))[1]
    return port


def _somebody_came() -> bool:
    """Wait for a debugger up to `_LONGEST` seconds or until the user interrupts; return whether it connected."""
    import pydevd

    enough, deadline = threading.Event(), time.monotonic() + _LONGEST

    def look() -> None:
        interrupt = getattr(signal.getsignal(signal.SIGINT), "__self__", None)  # set in the run's own process
        while not enough.wait(_LOOK) and time.monotonic() < deadline:
            if isinstance(interrupt, Interrupt) and interrupt.requested:
                break
        enough.set()

    threading.Thread(target=look, name="astuner breakpoint", daemon=True).start()
    pydevd._wait_for_attach(cancel=enough)  # unlike `debugpy.wait_for_client`, another thread can cancel it
    return bool(pydevd._is_attached())


def _say(stop: Stop) -> None:
    """Report a stop to the run, or to this process's standard error."""
    if _current is not None:
        _current.hear(stop)
    elif not _left_with_ray(stop):
        _to_stderr(str(stop))


def _left_with_ray(stop: Stop) -> bool:
    """Report the stop through Ray's key-value store; return False if this is not a worker of a run."""
    ray, run = sys.modules.get("ray"), os.environ.get(RUN_VARIABLE)
    if ray is None or not run or not ray.is_initialized():
        return False
    from ray.experimental.internal_kv import _internal_kv_put  # used by Ray's own debugger; no public alternative

    _internal_kv_put(f"{run}/{uuid.uuid4().hex}", json.dumps(asdict(stop)), namespace=NAMESPACE)
    return True


def _hear(breakpoints: Breakpoints, over: threading.Event) -> None:
    from ray.exceptions import RayError
    from ray.experimental import internal_kv

    while True:
        ended = over.wait(_LOOK)
        try:
            for key in internal_kv._internal_kv_list(breakpoints._run, namespace=NAMESPACE):
                said = internal_kv._internal_kv_get(key, namespace=NAMESPACE)
                internal_kv._internal_kv_del(key, namespace=NAMESPACE)
                breakpoints.hear(Stop(**json.loads(said)))
        except RayError as e:  # the cluster is gone, which ends the run anyway
            breakpoints.note(f"breakpoints in workers are no longer reported: {type(e).__name__}: {e}")
            return
        if ended:
            return


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
