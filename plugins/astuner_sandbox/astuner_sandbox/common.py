"""The one sandbox that a process shares, and its end."""

from __future__ import annotations

import atexit
import os
import threading

from astuner_sandbox.python import PythonSandbox

_shared: PythonSandbox | None = None
_lock = threading.Lock()
_of_parents: list[PythonSandbox] = []
"""Kept, so that a forked child closes nothing of its parent's by forgetting it."""


def shared() -> PythonSandbox:
    """The sandbox of this process, with the usual limits; closed when the process ends."""
    global _shared
    with _lock:
        if _shared is None or _shared.is_closed:
            _shared = PythonSandbox()
        return _shared


@atexit.register
def _close() -> None:
    if _shared is not None:
        _shared.close()


def _forget() -> None:
    """In a forked child the sandbox is its parent's."""
    global _shared, _lock
    if _shared is not None:
        _of_parents.append(_shared)
        _shared = None
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget)
