"""Find run folders, and assign the IDs used in links.

A run folder contains ``resolved.yaml``. Its ID is its name if that is plain and the folder is directly below the root;
otherwise the ID ends with a hash of its path. Invariant: the ID in a request is looked up among the existing runs.
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
"""Number of levels below the root to search."""
MOST_FOLDERS = 20_000
"""Maximum number of folders to search, in case the root is an entire disk."""
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, kw_only=True)
class RunPlace:
    """A run folder."""

    id: str
    name: str
    """Path below the root, for display."""
    path: Path


class Runs:
    """The runs below a folder, or a single run."""

    def __init__(self, root: Path, only: Path | None = None) -> None:
        """Set the folder to search.

        :param only: show only this run folder, even if it is still empty.
        """
        self.root = root
        self._only = None if only is None else _place(only.parent, only)
        self._found: Mapping[str, RunPlace] = {}

    def all(self) -> Mapping[str, RunPlace]:
        """Return all runs by ID."""
        if self._only is not None:
            return {self._only.id: self._only}
        self._found = {place.id: place for place in (_place(self.root, folder) for folder in _run_folders(self.root))}
        return self._found

    def get(self, wanted: str) -> RunPlace | None:
        """Return the run with this ID; None if it does not exist."""
        known = self._found.get(wanted)
        if known is not None and (known.path / "resolved.yaml").is_file():
            return known
        return self.all().get(wanted)


def find_run(root: Path, wanted: str) -> Path:
    """Return the run folder for a path or a name below the root.

    :raises ConfigError: there is no such run; the message lists the existing ones.
    """
    for folder in (Path(wanted).expanduser(), root / wanted):
        if (folder / "resolved.yaml").is_file():
            return folder.resolve()
    there = Runs(root).all()
    if wanted in there:
        return there[wanted].path.resolve()
    names = sorted(place.name for place in there.values())
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    known = f"Runs below {root}: {', '.join(names[:10])}{more}" if names else f"There are no runs below {root}"
    raise ConfigError(
        f"{wanted} is not a run folder, because resolved.yaml is missing. {known}. Run `astuner view RUN`, or search "
        "another folder with --root DIR"
    )


def _place(root: Path, folder: Path) -> RunPlace:
    name = identity = folder.relative_to(root).as_posix()
    if not _PLAIN.fullmatch(name):
        slug = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:60] or "run"
        identity = f"{slug}~{hashlib.sha256(os.fsencode(name)).hexdigest()[:12]}"
    return RunPlace(id=identity, name=name, path=folder)


def _run_folders(root: Path) -> Iterator[Path]:
    """Yield the run folders below ``root``, each once even if linked; run folders are not searched."""
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
    """Return the visible folders in a folder; empty if it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return sorted(Path(e.path) for e in entries if not e.name.startswith(".") and e.is_dir())
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


def about(path: Path) -> tuple[int, ...]:
    """Return an identity of a file that changes when the file is written; empty if it does not exist."""
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
