"""Python's garbage collector and what a process loads.

torch, transformers and an agent framework are half a million objects that live as long as the process does.  The
collector goes through all of them whenever some more were made, and everything waits for that: a sixth of what it takes
to start a run, and a third of a second every few steps of it (`python -m benchmarks collector`).
"""

from __future__ import annotations

import gc
from functools import cache

_USUAL = gc.get_threshold()
_RARELY = (50_000, 20, 20)
"""Hardly anything that is made while modules are imported becomes garbage, and of what episodes make, hardly anything
needs the collector: every 700 objects, it took 3 % of a small model's step."""


def collect_rarely() -> None:
    """For a process that is ours, unless somebody has said how often it is to collect."""
    if gc.get_threshold() == _USUAL:
        gc.set_threshold(*_RARELY)


@cache
def leave_out_what_is_loaded() -> None:
    """Have the collector leave out what there is by now, and go through what is made later, rarely.

    To be called when the models are loaded; the first call in a process counts.  Objects that nothing refers to are
    freed as before; those that refer to each other only are not, if they existed by then.
    """
    collect_rarely()
    gc.freeze()
