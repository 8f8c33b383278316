"""Which files a person means by a list of paths: files, folders with all below them, and patterns.

Nothing is passed over in silence: what is not read (another suffix in a folder, a link that leads out of it) is named
in `Found.ignored`.  Invariant: the same files on disk give the same list, in the same order.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from astuner.contracts.errors import ConfigError
from astuner_flywheel.documents.document import KINDS

MARK = "generation.json"
"""The file by which a folder of generated tasks is known."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """The files to read, and those that were met and left out."""

    files: tuple[Path, ...]
    ignored: dict[str, str]
    """Path -> why it is not read."""


def find(paths: Sequence[str], base_dir: Path) -> Found:
    """The files that ``paths`` mean, each once, in the order of ``paths`` and below a folder by name.

    Hidden files and folders are passed over below a folder. A file that is named itself is always in the list, also
    one of another suffix: reading it says what is wrong.

    :param base_dir: what relative paths start from.
    :raises ConfigError: a path or pattern means no file.
    """
    files: dict[Path, None] = {}
    ignored: dict[str, str] = {}
    problems = []
    for written in paths:
        path = base_dir / Path(written).expanduser()
        if path.is_dir():
            found = list(_below(path, ignored))
            if not found:
                problems.append(f"documents: the folder {path} has no file with a suffix of {', '.join(sorted(KINDS))}")
        elif os.path.lexists(path):
            found = [path]
        elif glob.has_magic(str(path)):
            found = list(_matching(path, ignored))
            if not found:
                problems.append(f"documents: nothing that can be read matches {written!r} (looked for {path})")
        else:
            problems.append(
                f"documents: there is no {written!r} (looked for {path}); relative paths start at the experiment file"
            )
            continue
        files.update(dict.fromkeys(found))
    if problems:
        raise ConfigError(problems)
    return Found(files=tuple(files), ignored=ignored)


def is_made_here(folder: Path) -> bool:
    """Whether a folder holds generated tasks, whose copies of the documents are no documents."""
    return (folder / MARK).is_file()


def _below(folder: Path, ignored: dict[str, str]) -> Iterator[Path]:
    inside = folder.resolve()
    for place, folders, names in os.walk(folder):  # links to folders are not followed
        for name in [n for n in folders if os.path.islink(os.path.join(place, n))]:
            ignored[os.path.join(place, name)] = "a link to a folder; name the folder itself to read it"
        for name in [n for n in folders if is_made_here(Path(place) / n)]:
            ignored[os.path.join(place, name)] = "a folder of generated tasks"
            folders.remove(name)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith(".") and _wanted(path := Path(place) / name, inside, ignored):
                yield path


def _matching(pattern: Path, ignored: dict[str, str]) -> Iterator[Path]:
    fixed = next(parent for parent in pattern.parents if not glob.has_magic(str(parent)))
    inside = fixed.resolve()
    for name in sorted(glob.glob(str(pattern), recursive=True)):
        path = Path(name)
        if not path.is_dir() and _wanted(path, inside, ignored):
            yield path


def _wanted(path: Path, inside: Path, ignored: dict[str, str]) -> bool:
    if path.suffix.lower() not in KINDS:
        ignored[str(path)] = f"the suffix {path.suffix!r} is none that is read"
        return False
    if not path.resolve().is_relative_to(inside):
        ignored[str(path)] = "a link that leads out of the folder; name the file itself to read it"
        return False
    return True
