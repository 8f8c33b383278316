"""What happens at a breakpoint: pdb where a person has this process on a terminal, otherwise debugpy.

debugpy listens on loopback, on a free port of its own for each process, and lets whoever connects run code as this
person: there is no password in its protocol.  So it listens only from the first stop on, and the one that a run is
told about.  Invariant: nobody is waited for before the run was told where.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import pdb
import socket
import sys
import threading
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from types import FrameType
from typing import Any

from astuner.contracts.errors import MissingDependency
from astuner.runs.breakpoints import RUN_VARIABLE

LOOPBACK = "127.0.0.1"
NAMESPACE = b"astuner-breakpoints"
"""Of Ray's key-value store, in which a worker leaves its stops for the run."""


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


listen_always = False
"""Wait for a debugger though there is a terminal."""
tell: Callable[[Stop], None] | None = None
"""Told of every stop in the run's own process, by `astuner.runs.debug_session`; None: this is another process."""

_lock = threading.Lock()


def stop(tag: str, frame: FrameType) -> None:
    """Stop at ``frame``, the one that called `bp`.

    :raises MissingDependency: debugpy is needed, and not installed here.
    """
    place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    here = Stop(tag=tag, place=place, pid=os.getpid(), host=socket.gethostname())
    if on_terminal() and not listen_always:
        _say(here)
        pdb.Pdb().set_trace(frame)
        return
    debugpy = require_debugpy()
    with _lock:  # two threads may come to two tags at once
        port = _listen()
    _say(Stop(**{**asdict(here), "port": port}))
    debugpy.wait_for_client()
    import pydevd  # debugpy's own, importable since it listens

    # as `debugpy.breakpoint` does it, which knows no other frame than the one that calls it
    pydevd.settrace(suspend=True, trace_only_current_thread=True, patch_multiprocessing=False, stop_at_frame=frame)


def on_terminal() -> bool:
    """Whether a person has this process, and no parent of it, on a terminal."""
    return multiprocessing.parent_process() is None and sys.stdin.isatty() and sys.stdout.isatty()


def require_debugpy() -> Any:
    """The module.

    :raises MissingDependency: it is not installed.
    """
    if find_spec("debugpy") is None:
        raise MissingDependency(
            "this breakpoint is not on the run's terminal, so a debugger has to be waited for, which debugpy does: "
            "pip install 'astuner-core[debugger]'"
        )
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # a warning about frozen modules of Python
    import debugpy

    return debugpy


@functools.lru_cache(maxsize=1)
def _listen() -> int:
    """Listen; the port. debugpy can do that once for each process."""
    debugpy = require_debugpy()
    debugpy.configure(subProcess=False)  # what an agent starts is its own business
    port: int = debugpy.listen((LOOPBACK, 0))[1]
    return port


def _say(stop: Stop) -> None:
    """Tell the run, or whoever reads this process's errors."""
    if tell is not None:
        tell(stop)
    elif not _left_with_ray(stop):
        print(stop, file=sys.stderr, flush=True)


def _left_with_ray(stop: Stop) -> bool:
    """Leave the stop where the run's own process looks for it; False: this is no worker of a run."""
    ray, run = sys.modules.get("ray"), os.environ.get(RUN_VARIABLE)
    if ray is None or not run or not ray.is_initialized():
        return False
    from ray.experimental.internal_kv import _internal_kv_put  # what Ray's own debugger uses; there is no public one

    _internal_kv_put(f"{run}/{uuid.uuid4().hex}", json.dumps(asdict(stop)), namespace=NAMESPACE)
    return True
