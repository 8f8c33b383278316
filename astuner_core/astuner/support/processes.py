"""What this user's ASTuner runs started, so that ``astuner kill`` can end exactly that.

One file per process: ``$ASTUNER_HOME/processes/<pid>.json`` (``~/.astuner`` by default).  A process is identified by
its pid *and* its start time, because pids are reused; nothing is ever looked up by name.  Records of processes that
are gone are removed when the records are read.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

import astuner
from astuner.contracts.errors import RunError

_SAME = 2.0
"""Seconds between two looks at the start of one process: the system counts it from its own, which it may correct."""


@dataclass(frozen=True, kw_only=True)
class RecordedProcess:
    """A process that a run started."""

    pid: int
    started: str
    """In seconds since 1970, as text; see `is_same_process`."""
    what: str
    """For people, e.g. ``vllm server``."""
    run_dir: str
    """The absolute run folder it belongs to; empty when there is none."""


def astuner_home() -> Path:
    """``$ASTUNER_HOME``, by default ``~/.astuner``."""
    return Path(os.environ.get("ASTUNER_HOME") or Path.home() / ".astuner").expanduser()


def record_process(pid: int, what: str, run_dir: Path | str = "") -> RecordedProcess:
    """Record a process; overwrites an older record of the same pid.

    :raises ProcessLookupError: there is no such process.
    """
    started = process_start_time(pid)
    if started is None:
        raise ProcessLookupError(f"cannot record process {pid} ({what}): it is not running")
    process = RecordedProcess(
        pid=pid, started=started, what=what, run_dir=str(Path(run_dir).absolute()) if str(run_dir) else ""
    )
    folder = _folder()
    handle, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")  # created 0600
    with os.fdopen(handle, "w") as f:
        json.dump(asdict(process), f)
    os.replace(temporary, folder / f"{pid}.json")  # a reader sees the whole record or none
    return process


def forget_process(pid: int) -> None:
    """Forget a process; nothing happens when it is not recorded."""
    (_folder() / f"{pid}.json").unlink(missing_ok=True)


@contextmanager
def recorded_process(pid: int, what: str, run_dir: Path | str = "") -> Iterator[RecordedProcess]:
    """Record a process for as long as the block runs; raises as `record_process`."""
    process = record_process(pid, what, run_dir)
    try:
        yield process
    finally:
        forget_process(pid)


def recorded_processes(run_dir: Path | str | None = None) -> list[RecordedProcess]:
    """The recorded processes that still run, oldest record first; of one run folder when given."""
    wanted = None if run_dir is None else str(Path(run_dir).absolute())
    found = []
    for path in sorted(_folder().glob("*.json"), key=lambda p: p.stat().st_mtime):
        process = _read(path)
        if not is_same_process(process.pid, process.started):
            path.unlink(missing_ok=True)
        elif wanted is None or process.run_dir == wanted:
            found.append(process)
    return found


def is_same_process(pid: int, started: str) -> bool:
    """Whether process ``pid`` runs and is the one that `process_start_time` gave ``started`` for."""
    now = process_start_time(pid)
    try:
        return now is not None and abs(float(now) - float(started)) < _SAME
    except ValueError:  # a record of an ASTuner that knew processes by something else
        return False


def process_start_time(pid: int) -> str | None:
    """When process ``pid`` started, or None when there is none (a zombie does not count)."""
    try:
        process = psutil.Process(pid)
        return None if process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) else str(process.create_time())
    except psutil.NoSuchProcess:
        return None


def _folder() -> Path:
    folder = astuner_home() / "processes"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise RunError(f"{folder} belongs to another user; set ASTUNER_HOME to a folder of your own")
    folder.chmod(0o700)
    return folder


def _read(path: Path) -> RecordedProcess:
    try:
        return RecordedProcess(**json.loads(path.read_text()))
    except (ValueError, TypeError) as e:
        raise RunError(f"{path} is not a process record ({e}); look at it, then: rm {path}") from None


if not TYPE_CHECKING:
    __getattr__ = astuner.older_names(__name__)
