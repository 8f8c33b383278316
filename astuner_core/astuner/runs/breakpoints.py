"""Breakpoints by tag: ``bp("TAG")`` stops in a run that was started with ``--db TAG``, and nowhere else.

The line may stay in an agent's code: without ``--db`` it is one look into the environment.  Tags reach Ray's workers
in variables, so it does not matter in which process of the run the line is.
"""

from __future__ import annotations

import os
import sys
import threading

TAGS_VARIABLE = "ASTUNER_DEBUG_TAGS"
"""The tags that stop, joined by ``|``; set by the part ``debugger`` (`astuner.contracts.parts`)."""

_stopped: set[str] = set()
_lock = threading.Lock()


def bp(tag: str, *, once: bool = True) -> None:
    """Stop at the line that calls this, if the run was started with ``--db`` and this tag.

    On the terminal of the run's own process that is Python's debugger, pdb.  Everywhere else (a Ray worker, a run
    without a terminal, ``--db-listen``) a debugger is waited for, and the run says where: see ``docs/debugging.md``.

    :param tag: letters, digits and ``_ . -``.
    :param once: stop only the first time that this process comes to the tag, so that later episodes go on.
    :raises astuner.contracts.errors.MissingDependency: the package that stops is not installed here.
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
    debugger.stop(tag, sys._getframe(1))  # the last thing here: pdb's next stop is the next line of whoever called


def debugging() -> bool:
    """Whether this process was told of tags."""
    return bool(os.environ.get(TAGS_VARIABLE))
