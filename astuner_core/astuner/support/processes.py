"""What this user's ASTuner runs started, so that ``astuner kill`` can end exactly that.

One file per process: ``$ASTUNER_HOME/processes/<pid>.json`` (``~/.astuner`` by default).  A process is identified by
its pid *and* its start time, because pids are reused; nothing is ever looked up by name.  Records of processes that
are gone are removed when the records are read.
"""

from __future__ import annotations

import functools
import json
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

import astuner
from astuner.contracts.errors import RunError

_PROCESSES = "processes"
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
    """Return ``$ASTUNER_HOME``, by default ``~/.astuner``; a folder for temporary files where that cannot be written.

    :raises RunError: No folder can be used.
    """
    chosen = os.environ.get("ASTUNER_HOME")
    try:
        home = Path(chosen or "~/.astuner").expanduser()
    except RuntimeError:  # HOME is not set, and the user is not in /etc/passwd
        home = None
    if home is not None and (chosen or _can_be_written(home)):
        return home
    return _temporary_home(home)


def home_folder(kind: str) -> Path:
    """Return the folder of this name in `astuner_home`, created for this user only.

    :raises RunError: It cannot be created or written.
    """
    folder = astuner_home() / kind
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise RunError(f"{folder} belongs to another user; set ASTUNER_HOME to a folder of your own")
        folder.chmod(0o700)
    except OSError as e:
        raise _home_unusable(folder, e) from e
    return folder


def _home_unusable(place: Path, error: OSError) -> RunError:
    return RunError(f"{place} cannot be written ({error.strerror or error}); set ASTUNER_HOME to a folder that can")


def _can_be_written(folder: Path) -> bool:
    """Whether a folder, or the parent in which it would be made, can be written."""
    there = next((path for path in (folder, *folder.parents) if os.path.exists(path)), folder)
    return os.path.isdir(there) and os.access(there, os.W_OK | os.X_OK)


@functools.cache
def _temporary_home(instead_of: Path | None) -> Path:
    """Return, and mention once, the folder that replaces a home that cannot be written.

    :raises RunError: There is none, or another user made it.
    """
    try:
        folder = Path(tempfile.gettempdir()) / f"astuner-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as e:
        raise RunError(
            f"neither {instead_of or 'a home folder'} nor a folder for temporary files can be written "
            f"({e.strerror or e}); set ASTUNER_HOME to a folder that can"
        ) from e
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise RunError(f"{folder} is not a private folder of this user; set ASTUNER_HOME to a folder of your own")
    what = "there is no home folder" if instead_of is None else f"{instead_of} cannot be written"
    print(f"astuner: {what}, so {folder} is used; set ASTUNER_HOME to keep it elsewhere", file=sys.stderr)
    return folder


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
    folder = home_folder(_PROCESSES)
    try:
        handle, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")  # created 0600
        with os.fdopen(handle, "w") as f:
            json.dump(asdict(process), f)
        os.replace(temporary, folder / f"{pid}.json")  # a reader sees the complete record or none
    except OSError as e:
        raise _home_unusable(folder, e) from e
    return process


def forget_process(pid: int) -> None:
    """Forget a process; nothing happens when it is not recorded, or its record cannot be removed."""
    with suppress(OSError, RunError):  # whoever reads the records removes it then
        (home_folder(_PROCESSES) / f"{pid}.json").unlink(missing_ok=True)


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
    for path in sorted(home_folder(_PROCESSES).glob("*.json"), key=lambda p: p.stat().st_mtime):
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


def _read(path: Path) -> RecordedProcess:
    try:
        return RecordedProcess(**json.loads(path.read_text()))
    except (ValueError, TypeError) as e:
        raise RunError(f"{path} is not a process record ({e}); look at it, then: rm {path}") from None


if not TYPE_CHECKING:
    __getattr__ = astuner.older_names(__name__)
