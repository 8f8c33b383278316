"""How a forked process ends itself, and how an end reads in words.

Invariant: a forked child never returns into what its parent was doing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn


def leave_after(work: Callable[[], object]) -> NoReturn:
    """Call ``work``, the whole of a forked child's life, and `leave` as a script would that ends so."""
    code = 1
    try:
        work()
        code = 0
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        leave(code)


def leave(code: int) -> NoReturn:
    """End this process now, with what it printed but without what its parent registered for its own exit."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, full, or replaced: it ends anyhow
            stream.flush()
    os._exit(code)


def how_it_ended(returncode: int) -> str:
    """An exit code, or minus a signal's number, in words."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:  # a real-time signal
        name = f"signal {-returncode}"
    return f"killed by {name}" + (" (out of memory?)" if returncode == -signal.SIGKILL else "")
