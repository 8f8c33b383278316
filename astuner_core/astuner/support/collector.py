"""Reduce the cost of Python's garbage collector.

torch, transformers and an agent framework create about half a million objects that live as long as the process. By
default, the collector scans them frequently and pauses the process: about a sixth of the start-up time, and a third of
a second every few steps (`python -m benchmarks collector`).
"""

from __future__ import annotations

import gc
from functools import cache

_USUAL = gc.get_threshold()
_RARELY = (50_000, 20, 20)
"""Thresholds for rare collections. Imports and episodes create almost no garbage that needs the collector; with
Python's default of 700 objects, it took 3 % of a small model's step."""


def collect_rarely() -> None:
    """Collect rarely in ASTuner's own processes, unless the user changed the thresholds."""
    if gc.get_threshold() == _USUAL:
        gc.set_threshold(*_RARELY)


@cache
def leave_out_what_is_loaded() -> None:
    """Exclude all existing objects from garbage collection, and collect new objects rarely.

    Call it after the models are loaded. Only the first call in a process has an effect. Existing objects are still
    freed when their reference count reaches 0, but existing reference cycles are not.
    """
    collect_rarely()
    gc.freeze()
