"""Breakpoints by tag: ``bp("TAG")`` stops only in a run started with ``--db TAG``.

The call can stay in an agent's code: without ``--db`` it reads one environment variable. Ray workers inherit the
variable, so breakpoints work in every process of the run.
"""

from __future__ import annotations

import os
import sys
import threading

TAGS_VARIABLE = "ASTUNER_DEBUG_TAGS"
"""Active tags, joined by ``|``; set by the part ``debugger`` (`astuner.contracts.parts`)."""

_stopped: set[str] = set()
_lock = threading.Lock()


def bp(tag: str, *, once: bool = True) -> None:
    """Stop at the calling line if the run was started with ``--db`` and this tag.

    In the terminal of the run's own process, Python's debugger (pdb) opens. In all other cases (a Ray worker, a run
    without a terminal, ``--db-listen``) the process waits for a debugger and prints its address. See
    ``docs/debugging.md``.

    :param tag: Letters, digits and ``_ . -``.
    :param once: Stop only the first time that this process reaches the tag.
    :raises astuner.contracts.errors.MissingDependency: The debugger's package is not installed.
    """
    tags = os.environ.get(TAGS_VARIABLE)
    if not tags or tag not in tags.split("|"):
        return
    with _lock:
        if once and tag in _stopped:
            return
        _stopped.add(tag)
    from astuner.plugins import registry
    from astuner.plugins.loader import load_plugins

    debugger = registry.find_part(load_plugins(), "debugger", wanted_by=f'bp("{tag}")')
    debugger.stop(tag, sys._getframe(1))  # keep this the last line: pdb stops at the next line of the caller


def debugging() -> bool:
    """Return whether breakpoint tags are set in this process."""
    return bool(os.environ.get(TAGS_VARIABLE))
