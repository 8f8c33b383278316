"""Python's garbage collector and what a process loads.

torch, transformers and an agent framework are half a million objects that live as long as the process does.  The
collector goes through all of them whenever some more were made, and everything waits for that: a sixth of what it takes
to start a run, and a third of a second every few steps of it (`python -m benchmarks collector`).
"""

from __future__ import annotations

import gc
from functools import cache

_USUAL = gc.get_threshold()
_WHILE_LOADING = (50_000, 20, 20)
"""Hardly anything that is made while modules are imported becomes garbage."""


def collect_rarely_while_loading() -> None:
    """For a command that runs episodes, until `leave_out_what_is_loaded`.

    Where others run them (on Ray), it goes on collecting rarely; it has little to do.
    """
    gc.set_threshold(*_WHILE_LOADING)


def leave_out_what_is_loaded() -> None:
    """Have the collector leave out what there is by now; what is made later it goes through as usual.

    To be called when the models are loaded; the first call in a process counts.  Objects that nothing refers to are
    freed as before; those that refer to each other only are not, if they existed by then.
    """
    if gc.get_threshold()[0] == _WHILE_LOADING[0]:  # an interpreter may not keep the others
        gc.set_threshold(*_USUAL)
    _freeze()


@cache
def _freeze() -> None:
    gc.freeze()
