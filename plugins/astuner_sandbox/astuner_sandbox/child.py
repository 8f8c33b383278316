"""Run inside the sandbox: confine the process, then execute the script.

When the code starts, nothing of the parent is left: the process has its own directory and two output pipes.
"""

from __future__ import annotations

import atexit
import io
import linecache
import os
import sys
import threading
import traceback
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

from astuner.contracts.errors import AstunerError
from astuner_sandbox.isolation.channel import Channel
from astuner_sandbox.isolation.confine import Confinement, confine
from astuner_sandbox.isolation.proc import leave

NAME = "main.py"
_USUAL = """bisect cmath collections copy dataclasses datetime decimal enum fractions functools hashlib heapq itertools
json math numbers operator random re statistics string struct textwrap time typing"""


def warm() -> None:
    """Import common modules, which all runs then share."""
    for name in _USUAL.split():
        import_module(name)


def main(channel: Channel, options: Mapping[str, Any]) -> None:
    """Receive ``{"code"}``, answer with ``{"level"}`` or ``{"refused"}``, run the code and end the process."""
    code = channel.recv()["code"]
    os.chdir(options["folder"])
    os.environ.clear()
    os.environ.update(options["environ"])
    try:
        level = confine(Confinement(**options["confinement"]), options["require"])
    except AstunerError as e:
        channel.send({"refused": str(e)})
        return
    channel.send({"level": level.as_json()})
    channel.close()
    sys.stdout = sys.__stdout__ = _stream(1)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _stream(2)  # type: ignore[misc]
    leave(run(code, options["folder"]))


def run(code: str, folder: str) -> int:
    """Run code as a script and return its exit code."""
    module = ModuleType("__main__")
    module.__file__ = os.path.join(folder, NAME)
    sys.modules["__main__"] = module
    sys.path.insert(0, folder)
    sys.argv[:] = [NAME]
    # for tracebacks, since the code is not a file
    linecache.cache[NAME] = (len(code), None, code.splitlines(keepends=True), NAME)
    status = _status_of(code, module)
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    return status


def _status_of(code: str, module: ModuleType) -> int:
    try:
        exec(compile(code, NAME, "exec"), module.__dict__)
    except SystemExit as e:
        if e.code is None or isinstance(e.code, int):
            return (e.code or 0) & 0xFF
        print(e.code, file=sys.stderr)
        return 1
    except BaseException as e:
        shown = e.__traceback__
        traceback.print_exception(type(e), e, shown.tb_next if shown is not None else None)  # without this frame
        return 1
    return 0


def _stream(descriptor: int) -> io.TextIOWrapper:
    """Return an unbuffered stream, so that no output is lost when the process is stopped."""
    raw: Any = io.FileIO(descriptor, "w", closefd=False)
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)
