"""The state of one run, from the small files in its folder; each file is read again only when it has changed.

A book is used by several threads. Its lock is never held while the episode log is read.
"""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

from astuner import process_start_time
from astuner.contracts.errors import DataError
from astuner_record.episode_log.store import parsed
from astuner_record.exam import FILE as LABELS
from astuner_record.foreign import is_plain_file, read_resolved
from astuner_report.compare import settings_of
from astuner_view.runs import RunPlace, about

FILES = ("report.html", "report.md", "reward_curve.png", "reward_curve.svg", "resolved.yaml", "run.log")
"""Files of a run folder that are served unchanged."""


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


_PARSED: dict[str, Callable[[Path], Any]] = {
    "resolved.yaml": read_resolved, "certificate.json": _json, "summary.json": _json, "origin.json": _json,
}  # fmt: skip
_LOOKED_AT = 256
"""Number of bytes before the cursor that are compared."""
_LINES = ("metrics.jsonl", "alarms.jsonl")
_LARGEST_PROGRESS = 64 << 10
"""Maximum bytes of ``progress.json``."""
_SECONDS = ("elapsed_seconds", "remaining_seconds")
_DATED = ("run.log", "resolved.yaml", "summary.json", *_LINES)


class Book:
    """The small files of one run."""

    def __init__(self, place: RunPlace) -> None:
        self.place = place
        self._lock = threading.Lock()
        self._tail = Tail(rows=[], cursor="", reset=True)
        self._bad = 0
        self._known: dict[str, Any] = {}
        """Latest values of the metrics read so far."""
        self._alarm_tail = self._tail
        self._alarms: list[dict[str, Any]] = []

    def facts(self, episodes: int) -> dict[str, Any]:
        """Return an entry of the list of runs.

        :param episodes: number of episodes in the log.
        """
        with self._lock:
            self._read_on()
            config = self._mapping("resolved.yaml") or {}
            backbone, common = _at(config, "astuner").get("backbone"), _at(config, "astuner", "trainer_common")
            metrics, state = self._known, self.state()
            return {
                "id": self.place.id,
                "name": self.place.name,
                "state": state,
                "backbone": backbone,
                "model": _at(config, "astuner", "model").get("path"),
                "step": metrics.get("step", 0),
                "total_steps": None if backbone == "debug" else common.get("total_steps"),  # debug runs do not train
                "progress": self._progress() if state == "running" else None,
                "started": self._started(),
                "updated": self._updated(state),
                "episodes": episodes,
                "reward": metrics.get("reward/mean"),
                "success": metrics.get("val/success", metrics.get("success/mean")),
                "alarms": len(self._alarms),
            }

    def status(self, episodes: int) -> dict[str, Any]:
        """Return the values that a live page updates."""
        facts = self.facts(episodes)
        return {key: facts[key] for key in ("state", "step", "episodes", "alarms", "updated", "progress")}

    def page(self, episodes: int, facets: Mapping[str, Any], problems: Sequence[str]) -> dict[str, Any]:
        """Return the data of a run's page: `facts` and more; ``alarms`` contains the alarms instead of their number.

        :param episodes, facets, problems: of the run's log.
        """
        facts = self.facts(episodes)
        config = self.place.path / "resolved.yaml"
        with self._lock:
            self._read_on()
            found = {
                "config": config.read_text(encoding="utf-8", errors="replace") if is_plain_file(config) else "",
                "certificate": self._mapping("certificate.json"),
                "summary": self._mapping("summary.json"),
                "alarms": list(self._alarms),
                "files": {name: True for name in FILES if is_plain_file(self.place.path / name)},
            }
            return facts | found | {"facets": facets, "problems": [*self._problems(), *problems]}

    def settings(self) -> dict[str, Any]:
        """Return the settings in ``resolved.yaml`` by dotted keys; empty if it cannot be read, which is a problem."""
        return settings_of(self._mapping("resolved.yaml") or {})

    def problems(self) -> list[str]:
        """Return the problems of the small files, one sentence each."""
        with self._lock:
            self._read_on()
            return self._problems()

    def metrics(self, cursor: str = "") -> Tail:
        """Return the rows of ``metrics.jsonl`` after a cursor."""
        return read_since(self.place.path / "metrics.jsonl", cursor)

    def alarms(self, cursor: str = "") -> Tail:
        """Return the rows of ``alarms.jsonl`` after a cursor."""
        return read_since(self.place.path / "alarms.jsonl", cursor)

    def state(self) -> str:
        """Return ``ended`` (finished), ``running`` (a process of this machine holds the lock) or ``stopped``."""
        path = self.place.path
        if (path / "summary.json").is_file():
            return "ended"
        return "running" if _is_held(path.with_name(f".{path.name}.lock")) else "stopped"

    def _updated(self, state: str) -> float:
        """Return the time of the last change in seconds since 1970; 0 if there is none.

        For a run that is not running, use the times that it recorded, because copies of files have other dates.
        """
        if state != "running":
            own = [start.get("ended") for start in self._starts()] + [self._known.get("last")]
            if times := [time for time in own if _is_number(time)]:
                return max(times)
        paths = [self.place.path / name for name in _DATED] + list((self.place.path / "episodes").glob("*.arrows"))
        return max((p.stat().st_mtime for p in paths if p.exists()), default=0.0)

    def _progress(self) -> dict[str, Any] | None:
        """Return the content of ``progress.json``; None if it is missing, invalid, or of an earlier start."""
        path = self.place.path / "progress.json"
        try:
            found = _json(path) if is_plain_file(path) and path.stat().st_size <= _LARGEST_PROGRESS else None
        except (OSError, ValueError, RecursionError):
            return None
        numbers = ("time", "step", "total_steps", "done", "total")
        if not (isinstance(found, dict) and all(_is_number(found.get(name)) for name in numbers)):
            return None
        started = [time for start in self._starts()[-1:] if _is_number(time := start.get("started"))]
        if found["time"] < max(started, default=0.0) or found.get("phase") in ("finished", "stopped"):
            return None
        optional = {name: v if _is_number(v := found.get(name)) else None for name in _SECONDS}
        return {"phase": str(found.get("phase", ""))[:80], **{name: found[name] for name in numbers}, **optional}

    def _read_on(self) -> None:
        tail = self.metrics(self._tail.cursor)
        if tail.reset:
            self._known, self._bad = {}, 0
        for row in tail.rows:
            if _is_number(time := row.get("time")):
                self._known = {"first": time} | self._known | {"last": time}
            self._known |= {
                k: row[k] for k in ("step", "reward/mean", "success/mean", "val/success") if _is_number(row.get(k))
            }
        self._bad += tail.bad
        self._tail = Tail(rows=[], cursor=tail.cursor, reset=False)
        alarms = self.alarms(self._alarm_tail.cursor)
        self._alarms = alarms.rows if alarms.reset else self._alarms + alarms.rows
        self._alarm_tail = Tail(rows=[], cursor=alarms.cursor, reset=False)

    def _started(self) -> float | None:
        """Return when the run started: as recorded, else the time of its config, which is rewritten on resume."""
        own = [start.get("started") for start in self._starts()] + [self._known.get("first")]
        resolved = self.place.path / "resolved.yaml"
        times = [time for time in own if _is_number(time)]
        return min(times, default=resolved.stat().st_mtime if resolved.exists() else None)

    def _starts(self) -> list[Mapping[str, Any]]:
        starts = (self._mapping("origin.json") or {}).get("starts")
        return [start for start in starts if isinstance(start, Mapping)] if isinstance(starts, list) else []

    def _mapping(self, name: str) -> dict[str, Any] | None:
        found = self._content(name)
        return found if isinstance(found, dict) else None

    def _content(self, name: str) -> Any:
        """Return the content of one of `_PARSED`; None if it is missing, an exception if it is invalid."""
        path = self.place.path / name
        return _parsed(path, *about(path)) if is_plain_file(path) else None

    def _problems(self) -> list[str]:
        contents = {name: self._content(name) for name in _PARSED}
        wrong = [f"{name} could not be read: {e}" for name, e in contents.items() if isinstance(e, Exception)]
        read = (path for path in map(self.place.path.joinpath, (*_PARSED, *_LINES, LABELS)) if os.path.lexists(path))
        wrong += [
            f"{path.name} was ignored, because it is not a plain file" for path in read if not is_plain_file(path)
        ]
        if self._bad:
            wrong.append(f"metrics.jsonl: {self._bad} invalid lines were skipped")
        return wrong


@lru_cache(maxsize=1024)
def _parsed(path: Path, *_about: object) -> Any:
    try:
        return _PARSED[path.name](path)
    except FileNotFoundError:  # deleted in the meantime
        return None
    except (ValueError, RecursionError, DataError) as e:
        return e


def _at(config: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    found: Any = config
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_held(lock: Path) -> bool:
    """Return whether the process in a run's lock file is running and has the lock open, because PIDs are reused.

    The lock itself is not acquired, because a run that starts at that moment would find it in use.
    """
    try:
        pid = int(lock.read_text(encoding="utf-8").strip()) if is_plain_file(lock) else 0
    except (OSError, ValueError):
        return False
    if pid <= 0 or process_start_time(pid) is None:
        return False
    held = os.path.realpath(lock)
    try:
        return any(os.path.realpath(fd) == held for fd in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # no /proc, or a process of another user
        return True


# ---- a growing file of JSON lines, read from where the last reader stopped -------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Tail:
    """New lines of a growing file.

    A cursor identifies the file, the position, and the content before that position, so a rewritten file (the run was
    resumed from an earlier step) is detected and read from its beginning.
    """

    rows: list[dict[str, Any]]
    cursor: str
    """Where to continue."""
    reset: bool
    """Whether ``rows`` are all rows instead of those after the cursor."""
    bad: int = 0
    """Number of skipped lines that are not JSON objects."""


def read_since(path: Path, cursor: str = "") -> Tail:
    """Return the complete lines after ``cursor``; all lines if the cursor is stale, none if the file is missing.

    :raises OSError: the file cannot be read.
    """
    if not is_plain_file(path):
        return Tail(rows=[], cursor="", reset=True)
    with path.open("rb") as file:
        start = _start(file, cursor)
        file.seek(start or 0)
        data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        next_cursor = _cursor(file, (start or 0) + len(whole))
    rows, bad = [], 0
    for line in whole.splitlines():
        try:
            row = parsed(line)
        except (ValueError, RecursionError):  # invalid JSON or UTF-8, or nested too deeply
            row = None
        if isinstance(row, dict):
            rows.append(row)
        else:
            bad += 1
    return Tail(rows=rows, cursor=next_cursor, reset=start is None, bad=bad)


def _start(file: BinaryIO, cursor: str) -> int | None:
    """Return where to continue; None if the cursor is empty or belongs to another file."""
    end = cursor.split("-")[1] if cursor.count("-") == 2 else ""
    if not (end.isdecimal() and end.isascii()) or len(end) > 18:
        return None
    return int(end) if _cursor(file, int(end)) == cursor else None


def _cursor(file: BinaryIO, end: int) -> str:
    about = os.fstat(file.fileno())
    if about.st_size < end:
        return ""
    start = max(0, end - _LOOKED_AT)
    file.seek(start)
    return f"{about.st_ino:x}-{end}-{zlib.crc32(file.read(end - start)):x}"
