"""Which runs there are, and what each is called in links.

A run folder is one with ``resolved.yaml``.  Its id is its name, where that is plain and the folder is right below the
root; otherwise a hash of where it is follows.  Invariant: a request's id is looked up among those that were found.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from astuner.contracts.errors import ConfigError

DEPTH = 3
"""Levels below the root that are looked at."""
MOST_FOLDERS = 20_000
"""That are looked at, in case the root is a whole disk."""
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, kw_only=True)
class RunPlace:
    """A run folder."""

    id: str
    name: str
    """For people: its path below the root."""
    path: Path


class Runs:
    """The runs below a folder, or one run alone."""

    def __init__(self, root: Path, only: Path | None = None) -> None:
        """:param only: show this run folder, even before there is anything in it, and no other."""
        self.root = root
        self._only = None if only is None else _place(only.parent, only)
        self._found: Mapping[str, RunPlace] = {}

    def all(self) -> Mapping[str, RunPlace]:
        """Id -> run."""
        if self._only is not None:
            return {self._only.id: self._only}
        self._found = {place.id: place for place in (_place(self.root, folder) for folder in _run_folders(self.root))}
        return self._found

    def get(self, wanted: str) -> RunPlace | None:
        """The run with that id; None where there is none."""
        known = self._found.get(wanted)
        if known is not None and (known.path / "resolved.yaml").is_file():
            return known
        return self.all().get(wanted)


def find_run(root: Path, wanted: str) -> Path:
    """The run folder that a person means: a path, or a name below the root.

    :raises ConfigError: there is none; says which there are.
    """
    for folder in (Path(wanted).expanduser(), root / wanted):
        if (folder / "resolved.yaml").is_file():
            return folder.resolve()
    there = Runs(root).all()
    if wanted in there:
        return there[wanted].path.resolve()
    names = sorted(place.name for place in there.values())
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    known = f"below {root} there are {', '.join(names[:10])}{more}" if names else f"below {root} there is none"
    raise ConfigError(
        f"{wanted} is no run folder (there is no resolved.yaml in it); {known}. Type: astuner view RUN, or look "
        "elsewhere with --root DIR"
    )


def _place(root: Path, folder: Path) -> RunPlace:
    name = identity = folder.relative_to(root).as_posix()
    if not _PLAIN.fullmatch(name):
        slug = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:60] or "run"
        identity = f"{slug}~{hashlib.sha256(os.fsencode(name)).hexdigest()[:12]}"
    return RunPlace(id=identity, name=name, path=folder)


def _run_folders(root: Path) -> Iterator[Path]:
    """Those below ``root``, each once however it is linked to; nothing is looked for inside of a run."""
    level, seen, looked_at = [root], set[str](), 0
    for _ in range(DEPTH):
        below: list[Path] = []
        for folder in level:
            for entry in _folders(folder):
                looked_at += 1
                real = os.path.realpath(entry)
                if real in seen or looked_at > MOST_FOLDERS:
                    continue
                seen.add(real)
                if (entry / "resolved.yaml").is_file():
                    yield entry
                else:
                    below.append(entry)
        level = below


def _folders(folder: Path) -> list[Path]:
    """The visible folders in a folder; none where we may not look."""
    try:
        with os.scandir(folder) as entries:
            return sorted(Path(e.path) for e in entries if not e.name.startswith(".") and e.is_dir())
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


def about(path: Path) -> tuple[int, ...]:
    """Which file it is, and what differs once something was written to it; empty where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
