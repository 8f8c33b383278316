"""The first name of `astuner`: each name and each module below it is the one below ``astuner``, told once."""

from __future__ import annotations

import sys

from astuner_compat.moved import FINDER, tell

if FINDER not in sys.meta_path:
    sys.meta_path.insert(0, FINDER)

tell("the package astune is astuner now; the old name goes with the next release")


def __getattr__(name: str) -> object:
    import astuner

    return getattr(astuner, name)
