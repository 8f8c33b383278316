"""What code in the sandbox may read of this machine: the interpreter's own library, and what it links against."""

from __future__ import annotations

import site
import sysconfig
from functools import cache

from astuner_sandbox.isolation.places import SYSTEM

DEVICES_TO_WRITE = ("/dev/null",)


@cache
def readable() -> tuple[str, ...]:
    """Absolute paths. A package installed in editable mode is not among them: its folder may hold anything."""
    library = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return tuple(dict.fromkeys([*library, *site.getsitepackages(), *SYSTEM]))
