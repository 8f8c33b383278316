"""Alias of `astuner`: each name and submodule is the one of ``astuner``, with a single warning."""

from __future__ import annotations

import sys

from astuner_compat.moved import FINDER, tell

if FINDER not in sys.meta_path:
    sys.meta_path.insert(0, FINDER)

tell("the package astune was renamed to astuner; the old name will be removed in the next release")


def __getattr__(name: str) -> object:
    import astuner

    return getattr(astuner, name)
