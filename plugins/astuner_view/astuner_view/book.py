"""What one run is at, from the small files in its folder; each is read again only when it has changed.

Used by several threads: a book has a lock, which is never held while the episode log is looked at.
"""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from astuner.support.processes import start_time
from astuner_view.json_tail import Tail, read_since
from astuner_view.runs import RunPlace

FILES = {
    "report.html": "text/html; charset=utf-8",
    "report.md": "text/plain; charset=utf-8",
    "reward_curve.png": "image/png",
    "reward_curve.svg": "image/svg+xml",
    "resolved.yaml": "text/plain; charset=utf-8",
    "run.log": "text/plain; charset=utf-8",
}
"""What of a run folder is served as it is: name -> content type."""
_DATED = ("metrics.jsonl", "run.log", "resolved.yaml", "summary.json", "alarms.jsonl")


class Book:
    """The small files of one run."""

    def __init__(self, place: RunPlace) -> None:
        self.place = place
        self._lock = threading.Lock()
        self._tail = Tail(rows=[], cursor="", reset=True)
        self._bad = 0
        self._known: dict[str, Any] = {}
        """What the metrics that were read so far say."""
        self._alarm_tail = self._tail
        self._alarms: list[dict[str, Any]] = []
        self._parsed: dict[str, tuple[tuple[int, int, int], Any]] = {}
        """File name -> how the file was when it was read, and what was in it."""

    def facts(self, episodes: int) -> dict[str, Any]:
        """What a list of runs shows.

        :param episodes: how many the log has.
        """
        with self._lock:
            self._read_on()
            config = self._config()
            common = _at(config, "astuner", "trainer_common")
            metrics = self._known
            return {
                "id": self.place.id,
                "name": self.place.name,
                "state": self.state(),
                "backbone": _at(config, "astuner").get("backbone"),
                "model": _at(config, "astuner", "model").get("path"),
                "step": metrics.get("step", 0),
                "total_steps": common.get("total_steps"),
                "started": self._started(),
                "updated": self.updated(),
                "episodes": episodes,
                "reward": metrics.get("reward/mean"),
                "success": metrics.get("val/success", metrics.get("success/mean")),
                "alarms": len(self._alarms),
            }

    def status(self, episodes: int) -> dict[str, Any]:
        """What a live page shows."""
        facts = self.facts(episodes)
        return {key: facts[key] for key in ("state", "step", "episodes", "alarms", "updated")}

    def page(self, episodes: int, facets: dict[str, Any], problems: Sequence[str]) -> dict[str, Any]:
        """What the page of a run shows: `facts`, and more; its ``alarms`` are all of them, not how many.

        :param episodes, facets, problems: of the run's log.
        """
        facts = self.facts(episodes)
        with self._lock:
            self._read_on()
            found = {
                "config": _text(self.place.path / "resolved.yaml"),
                "certificate": self._json("certificate.json"),
                "summary": self._json("summary.json"),
                "alarms": list(self._alarms),
                "files": {name: True for name in FILES if is_plain_file(self.place.path / name)},
            }
            return facts | found | {"facets": facets, "problems": [*self._problems(), *problems]}

    def metrics(self, cursor: str = "") -> Tail:
        """The rows of ``metrics.jsonl`` since a cursor."""
        return read_since(self.place.path / "metrics.jsonl", cursor)

    def alarms(self, cursor: str = "") -> Tail:
        """The rows of ``alarms.jsonl`` since a cursor."""
        return read_since(self.place.path / "alarms.jsonl", cursor)

    def state(self) -> str:
        """``ended``: it came to its end; ``running``: a process of this machine is at it; else ``stopped``."""
        path = self.place.path
        if (path / "summary.json").is_file():
            return "ended"
        return "running" if _is_held(path.with_name(f".{path.name}.lock")) else "stopped"

    def updated(self) -> float:
        """When something was written last, in seconds since 1970; 0 when nothing was."""
        paths = [self.place.path / name for name in _DATED] + list((self.place.path / "episodes").glob("*.arrows"))
        return max((p.stat().st_mtime for p in paths if p.exists()), default=0.0)

    def _read_on(self) -> None:
        tail = self.metrics(self._tail.cursor)
        if tail.reset:
            self._known, self._bad = {}, 0
        for row in tail.rows:
            self._known.setdefault("time", row.get("time"))
            self._known |= {
                k: row[k] for k in ("step", "reward/mean", "success/mean", "val/success") if _is_number(row.get(k))
            }
        self._bad += tail.bad
        self._tail = Tail(rows=[], cursor=tail.cursor, reset=False)
        alarms = self.alarms(self._alarm_tail.cursor)
        self._alarms = alarms.rows if alarms.reset else self._alarms + alarms.rows
        self._alarm_tail = Tail(rows=[], cursor=alarms.cursor, reset=False)

    def _started(self) -> float | None:
        """When the first row was written, or the config if that is earlier: it is written again on resume."""
        resolved = self.place.path / "resolved.yaml"
        times = [resolved.stat().st_mtime] if resolved.exists() else []
        first = self._known.get("time")
        return min([*times, first] if isinstance(first, (int, float)) else times, default=None)

    def _config(self) -> dict[str, Any]:
        config = self._content("resolved.yaml", yaml.safe_load)
        return config if isinstance(config, dict) else {}

    def _json(self, name: str) -> Any:
        found = self._content(name, json.loads)
        return found if isinstance(found, dict) else None

    def _content(self, name: str, parse: Any) -> Any:
        """What is in a file; None where it is not there, and an error where it makes no sense."""
        path = self.place.path / name
        try:
            about = path.stat()
            seen = (about.st_ino, about.st_mtime_ns, about.st_size)
            if self._parsed.get(name, ((0, 0, 0), None))[0] != seen:
                self._parsed[name] = (seen, _parsed(parse, path))
        except FileNotFoundError:
            self._parsed.pop(name, None)
            return None
        return self._parsed[name][1]

    def _problems(self) -> list[str]:
        for name, parse in (("resolved.yaml", yaml.safe_load), ("certificate.json", json.loads)):
            self._content(name, parse)
        wrong = [f"{name} cannot be read: {found}" for name, (_, found) in self._parsed.items() if _failed(found)]
        if self._bad:
            wrong.append(f"metrics.jsonl: {self._bad} lines are no JSON, and are skipped")
        return wrong


def is_plain_file(path: Path) -> bool:
    """Whether it is a file that stands there itself: no link to somewhere else."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False


def _parsed(parse: Any, path: Path) -> Any:
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError) as e:
        return e


def _failed(found: Any) -> bool:
    return isinstance(found, Exception)


def _at(config: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    found: Any = config
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if is_plain_file(path) else ""


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_held(lock: Path) -> bool:
    """Whether the process that a run's lock names runs, and has the lock open: numbers of processes are reused.

    The lock itself is not tried, for a run that starts at that moment would find it taken.
    """
    try:
        pid = int(lock.read_text(encoding="utf-8").strip())
    except (OSError, ValueError):
        return False
    if pid <= 0 or start_time(pid) is None:
        return False
    held = os.path.realpath(lock)
    try:
        return any(os.path.realpath(fd) == held for fd in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # no /proc, or a process of somebody else
        return True
