"""Write a file or a folder that is complete or absent, and clean up after processes that were killed."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from astuner import process_start_time
from astuner.contracts.interrupt import handled


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a temporary path, and move it to ``target`` after the block, replacing what is there.

    SIGTERM and SIGHUP end the block like Ctrl-C. An exception in the block leaves ``target`` unchanged.

    :raises OSError: The target cannot be written.
    """
    temporary, aside = (target.with_name(f".{target.name}.{os.getpid()}.{end}") for end in ("tmp", "old"))
    try:
        with handled((signal.SIGTERM, signal.SIGHUP), _stop):
            target.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            if target.exists():
                target.rename(aside)
            temporary.rename(target)
            _remove(aside)
    finally:
        if aside.exists() and not target.exists():
            aside.rename(target)
        _remove(temporary)


def _stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def remove_leftovers(target: Path) -> None:
    """Remove temporary files of killed processes, and restore a target whose replacement was interrupted.

    Call this function before `replacing`, and before checking what ``target`` is.
    """
    for path in target.parent.iterdir() if target.parent.is_dir() else ():
        pid, _, end = path.name.removeprefix(f".{target.name}.").partition(".")
        if not (path.name.startswith(f".{target.name}.") and pid.isdecimal() and end in ("tmp", "old")):
            continue
        if process_start_time(int(pid)) is not None:
            continue
        if end == "old" and not target.exists():  # killed between the two renames
            path.rename(target)
        else:
            _remove(path)
