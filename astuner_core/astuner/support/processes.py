"""Record the processes that this user's runs started, so that ``astuner kill`` ends only these.

Each process has a file ``$ASTUNER_HOME/processes/<pid>.json`` (``~/.astuner`` by default). A process is identified by
its PID and start time, because PIDs are reused, and never by name. Reading the records removes records of ended
processes.
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
"""Tolerance in seconds between two readings of a process's start time, since the system may correct its clock."""


@dataclass(frozen=True, kw_only=True)
class RecordedProcess:
    """A process that a run started."""

    pid: int
    started: str
    """Start time in seconds since 1970, as a string; see `is_same_process`."""
    what: str
    """Description for messages, e.g. ``vllm server``."""
    run_dir: str
    """Absolute run folder that it belongs to; empty without one."""


def astuner_home() -> Path:
    """Return ``$ASTUNER_HOME``, by default ``~/.astuner``, or a temporary folder if that is not writable.

    :raises RunError: No folder is usable.
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
    """Return the folder ``kind`` in `astuner_home`, private to this user; create it if necessary.

    :raises RunError: It cannot be created or written.
    """
    folder = astuner_home() / kind
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise RunError(f"{folder} belongs to another user; set ASTUNER_HOME to a folder that you own")
        folder.chmod(0o700)
    except OSError as e:
        raise _home_unusable(folder, e) from e
    return folder


def _home_unusable(place: Path, error: OSError) -> RunError:
    return RunError(f"{place} cannot be written ({error.strerror or error}); set ASTUNER_HOME to a writable folder")


def _can_be_written(folder: Path) -> bool:
    """Return whether a folder, or the parent in which it would be created, is writable."""
    there = next((path for path in (folder, *folder.parents) if os.path.exists(path)), folder)
    return os.path.isdir(there) and os.access(there, os.W_OK | os.X_OK)


@functools.cache
def _temporary_home(instead_of: Path | None) -> Path:
    """Return the temporary folder that replaces a home that is not writable, and print a note once.

    :raises RunError: No temporary folder is writable, or another user created it.
    """
    try:
        folder = Path(tempfile.gettempdir()) / f"astuner-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as e:
        raise RunError(
            f"neither {instead_of or 'a home folder'} nor a temporary folder can be written "
            f"({e.strerror or e}); set ASTUNER_HOME to a writable folder"
        ) from e
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise RunError(f"{folder} is not a private folder of this user; set ASTUNER_HOME to a folder that you own")
    what = "no home folder found" if instead_of is None else f"{instead_of} cannot be written"
    print(f"astuner: {what}; using {folder} instead. Set ASTUNER_HOME to use another folder.", file=sys.stderr)
    return folder


def record_process(pid: int, what: str, run_dir: Path | str = "") -> RecordedProcess:
    """Record a process, replacing an older record with the same PID.

    :raises ProcessLookupError: The process does not exist.
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
    """Remove the record of a process, if it exists and can be removed."""
    with suppress(OSError, RunError):  # otherwise, the next reader removes it
        (home_folder(_PROCESSES) / f"{pid}.json").unlink(missing_ok=True)


@contextmanager
def recorded_process(pid: int, what: str, run_dir: Path | str = "") -> Iterator[RecordedProcess]:
    """Record a process during the block; raises the errors of `record_process`."""
    process = record_process(pid, what, run_dir)
    try:
        yield process
    finally:
        forget_process(pid)


def recorded_processes(run_dir: Path | str | None = None) -> list[RecordedProcess]:
    """Return recorded processes that still run, oldest record first, optionally of one run folder only."""
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
    """Return whether process ``pid`` runs and has the start time ``started`` (from `process_start_time`)."""
    now = process_start_time(pid)
    try:
        return now is not None and abs(float(now) - float(started)) < _SAME
    except ValueError:  # a record in an older format
        return False


def process_start_time(pid: int) -> str | None:
    """Return the start time of process ``pid``, or None if it does not exist or is a zombie."""
    try:
        process = psutil.Process(pid)
        return None if process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) else str(process.create_time())
    except psutil.NoSuchProcess:
        return None


def _read(path: Path) -> RecordedProcess:
    try:
        return RecordedProcess(**json.loads(path.read_text()))
    except (ValueError, TypeError) as e:
        raise RunError(f"{path} is not a valid process record ({e}); inspect it and remove it: rm {path}") from None


if not TYPE_CHECKING:
    __getattr__ = astuner.older_names(__name__)
