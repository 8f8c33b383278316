"""End the processes that an agent's code started with `subprocess` or asyncio when its episode ends.

Processes started by a library (a browser driver, a pool of workers), a judge or a constructor may serve other episodes.
They end with the run (`astuner_debug.left_behind`), as do plain forks.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import psutil

from astuner.plugins.user_code import is_own

_STARTED: contextvars.ContextVar[list[psutil.Process] | None] = contextvars.ContextVar("astuner_started", default=None)
"""Started processes of the current episode, shared by all its tasks and threads."""
_PASSED_OVER = (subprocess.__file__, os.path.join(os.path.dirname(asyncio.__file__), ""))
_GRACE = 2.0
"""Seconds between SIGTERM and SIGKILL."""


def keep_what_is_started(found: list[psutil.Process]) -> None:
    """Record processes that the agent's own code starts in this context in ``found``."""
    if not hasattr(subprocess.Popen.__init__, "__wrapped__"):
        subprocess.Popen.__init__ = _kept(subprocess.Popen.__init__)  # type: ignore[method-assign]
    _STARTED.set(found)


def end(started: Iterable[psutil.Process]) -> None:
    """End the given processes and their descendants. A caller that waits for one still gets its exit status."""
    left = set(started)
    for process in list(left):
        with suppress(psutil.Error):
            left.update(process.children(recursive=True))
    for signal in (psutil.Process.terminate, psutil.Process.kill):
        left = {process for process in left if _runs(process)}
        for process in left:
            with suppress(psutil.Error):
                signal(process)
        deadline = time.monotonic() + _GRACE
        while any(map(_runs, left)) and time.monotonic() < deadline:
            time.sleep(0.02)


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:  # the process has just ended
        return False


def _kept(start: Callable[..., None]) -> Callable[..., None]:
    """Wrap `subprocess.Popen.__init__` to record started processes. asyncio uses it, too."""

    @functools.wraps(start)
    def started(self: Any, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        found, frame = _STARTED.get(), sys._getframe(1)
        while found is not None and frame.f_back and frame.f_code.co_filename.startswith(_PASSED_OVER):
            frame = frame.f_back
        if found is not None and is_own(frame.f_code.co_filename):
            with suppress(psutil.Error):  # already ended
                found.append(psutil.Process(self.pid))

    return started
