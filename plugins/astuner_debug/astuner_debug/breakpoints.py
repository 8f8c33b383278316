"""``--db TAG|TAG``: what a run is told of its breakpoints, what happens at one, and what is heard from its workers.

A stop is pdb where a person has this process on a terminal, otherwise debugpy.  That listens on loopback, on a free
port of its own for each process, and lets whoever connects run code as this person: there is no password in its
protocol.  So it listens only from the first stop on.  Invariant: nobody is waited for before the run was told where.
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
"""The tags that stop, joined by ``|``; `astuner.bp` reads it, in whatever process of the run."""
RUN_VARIABLE = "ASTUNER_DEBUG_RUN"
"""Which run hears of a stop in a Ray worker."""
NAMESPACE = b"astuner-breakpoints"
"""Of Ray's key-value store, in which a worker leaves its stops for the run."""
LOOPBACK = "127.0.0.1"
_TAG = re.compile(r"[\w.-]+")
_LONGEST = 86400.0
"""Seconds in which somebody has to come, as the time limits of episodes have it."""
_LOOK = 0.5
"""Seconds between looks at what workers say."""

_current: Breakpoints | None = None
"""Those of this process's own run."""
_lock = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class Stop:
    """Somebody has come to a breakpoint."""

    tag: str
    place: str
    """``file:line``."""
    pid: int
    host: str
    port: int | None = None
    """Where debugpy listens on the loopback of ``host``; None: this is pdb, on the run's terminal."""

    def __str__(self) -> str:
        at = f"breakpoint {self.tag} at {self.place}"
        if self.port is None:
            return f"{at}: n goes to the next line, c on with the run, q fails this episode, h says what else there is"
        there = self.host != socket.gethostname()
        forward = f" (first: ssh -L {self.port}:{LOOPBACK}:{self.port} {self.host})" if there else ""
        return (
            f"{at} in process {self.pid} on {self.host} waits for a debugger at {LOOPBACK}:{self.port}{forward}; in VS "
            f"Code: Run and Debug, Python Debugger, Remote Attach, {LOOPBACK}, {self.port} (docs/debugging.md)"
        )


class Breakpoints(DebuggerPart):
    """Those of one command.

    A person at a breakpoint takes longer than anything may take, and wants to see one episode.  So the time limits of
    episodes, judges and environments are a day, and one episode runs at a time, unless the command line says otherwise.
    """

    overrides = AT_LEISURE

    def __init__(self, tags: Sequence[str], *, listen: bool = False) -> None:
        self.tags = tuple(dict.fromkeys(tag.strip() for text in tags for tag in re.split(r"[|,]", text)))
        if "" in self.tags:
            raise ConfigError("--db has an empty tag; write --db 'TAG1|TAG2', as in bp(\"TAG1\")")
        if wrong := next((tag for tag in self.tags if not _TAG.fullmatch(tag)), None):
            raise ConfigError(f"{wrong!r} is no tag: tags are letters, digits and _ . -, and between two of them is |")
        if not self.tags:
            raise ConfigError("--db-listen says how breakpoints stop, and there are none: write --db TAG too")
        self.note = _to_stderr
        self.listen = listen
        self._run, self._pid = uuid.uuid4().hex, os.getpid()
        self._reached: set[str] = set()

    def check(self, backbone: Backbone) -> str:
        if backbone.lends:
            raise ConfigError("--db is for the command that has the run; this one lends a part to it: leave it out")
        return (
            f"breakpoints: {', '.join(self.tags)}; time limits are a day, and one episode runs at a time, unless the "
            "command line says otherwise (astuner.rollout.max_env_worker=N)"
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
        """Somebody has come to a breakpoint."""
        self._reached.add(stop.tag)
        (self.note if os.getpid() == self._pid else _to_stderr)(str(stop))  # a fork has no say in the run's log

    def end(self) -> None:
        if missed := [tag for tag in self.tags if tag not in self._reached]:
            calls = ", ".join(f'bp("{tag}")' for tag in missed)
            self.note(f"breakpoints that nothing came to: {calls}; is it spelt so, and on a path that was taken?")

    @staticmethod
    def stop(tag: str, frame: FrameType) -> None:
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        here = Stop(tag=tag, place=place, pid=os.getpid(), host=socket.gethostname())
        if on_terminal() and not (_current is not None and _current.listen):
            _say(here)
            pdb.Pdb().set_trace(frame)
            return
        with _lock:  # two threads may come to two tags at once
            port = _listening()
        _say(replace(here, port=port))
        import pydevd  # debugpy's own, importable since it listens

        if not _somebody_came():
            (_current.note if _current else _to_stderr)(f"nobody came to breakpoint {tag}, so it is passed")
            return
        # as `debugpy.breakpoint` does it, which knows no other frame than the one that calls it
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
    """Whether a person has this process, and no parent of it, on a terminal."""
    return multiprocessing.parent_process() is None and sys.stdin.isatty() and sys.stdout.isatty()


@functools.lru_cache(maxsize=1)
def _listening() -> int:
    """The port on which debugpy listens; it can begin that once for each process."""
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # a warning about frozen modules of Python
    import debugpy

    debugpy.configure(subProcess=False)  # what an agent starts is its own business
    port: int = debugpy.listen((LOOPBACK, 0))[1]
    return port


def _somebody_came() -> bool:
    """Wait for a debugger, for `_LONGEST` and until the person asks the run to stop."""
    import pydevd

    enough, deadline = threading.Event(), time.monotonic() + _LONGEST

    def look() -> None:
        interrupt = getattr(signal.getsignal(signal.SIGINT), "__self__", None)  # it listens in the run's own process
        while not enough.wait(_LOOK) and time.monotonic() < deadline:
            if isinstance(interrupt, Interrupt) and interrupt.requested:
                break
        enough.set()

    threading.Thread(target=look, name="astuner breakpoint", daemon=True).start()
    pydevd._wait_for_attach(cancel=enough)  # as `debugpy.wait_for_client`, of which one thread can cancel another's
    return bool(pydevd._is_attached())


def _say(stop: Stop) -> None:
    """Tell the run, or whoever reads this process's errors."""
    if _current is not None:
        _current.hear(stop)
    elif not _left_with_ray(stop):
        _to_stderr(str(stop))


def _left_with_ray(stop: Stop) -> bool:
    """Leave the stop where the run's own process looks for it; False: this is no worker of a run."""
    ray, run = sys.modules.get("ray"), os.environ.get(RUN_VARIABLE)
    if ray is None or not run or not ray.is_initialized():
        return False
    from ray.experimental.internal_kv import _internal_kv_put  # what Ray's own debugger uses; there is no public one

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
        except RayError as e:  # the cluster is gone, which ends the run by itself
            breakpoints.note(f"breakpoints in workers are no longer heard of: {type(e).__name__}: {e}")
            return
        if ended:
            return


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
