"""Folders that are complete or not there.

A folder is written under another name, flushed to disk, given a manifest of what it holds, and renamed.  The rename is
the only moment at which it appears, so a process that is killed at any other moment leaves the earlier folders and
rubbish that no reader takes for one.

Invariant: a folder whose manifest matches its files was written to the end.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

MANIFEST = "manifest.json"
FORMAT = 1
"""Version of the folder's layout; a reader refuses a newer one."""
_HASHED_BYTES = 1 << 20
"""Files up to this size are checked by content, larger ones by size: a cut-off write shows in the size."""
_RUBBISH = re.compile(r"\.(tmp|old)-(\d+)$")


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder to write into; at the end of the block it becomes `folder`, replacing one of that name.

    An exception in the block leaves nothing behind.  While an old folder is being replaced it is called
    ``<name>.old-<pid>``, and `is_complete` still holds for it.
    """
    temporary = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    remove(temporary)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        _write_manifest(temporary)
        _flush(temporary)
    except BaseException:
        remove(temporary)
        raise
    aside = folder.with_name(f"{folder.name}.old-{os.getpid()}")
    if folder.exists():
        remove(aside)
        folder.rename(aside)
    temporary.rename(folder)
    _flush_folder(folder.parent)
    remove(aside)


def problem(folder: Path) -> str:
    """Why `folder` is not complete; empty when it is."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files, version = manifest["files"], manifest["format"]
    except FileNotFoundError:
        return "it has no manifest: it was not written to the end"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"its manifest cannot be read: {error!r}"
    if version > FORMAT:
        return f"its format is {version} and this version reads up to {FORMAT}: upgrade astuner-local"
    for name, entry in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry["bytes"]:
            return f"{name} has {path.stat().st_size} bytes instead of {entry['bytes']}"
        if "sha256" in entry and _sha256(path) != entry["sha256"]:
            return f"{name} was changed or damaged"
    return ""


def is_complete(folder: Path) -> bool:
    return folder.is_dir() and not problem(folder)


def remove(folder: Path) -> None:
    """Delete a folder so that no moment of it looks complete: the manifest goes first."""
    (folder / MANIFEST).unlink(missing_ok=True)
    if folder.exists():
        shutil.rmtree(folder)


def remove_rubbish(parent: Path) -> None:
    """Delete what killed processes left half-written. A folder that was being replaced is kept if its successor is not
    there."""
    for folder in parent.iterdir():
        match = _RUBBISH.search(folder.name)
        if match is None or _is_running(int(match[2])):
            continue
        replaced = folder.with_name(folder.name[: match.start()])
        if match[1] == "tmp" or is_complete(replaced) or not is_complete(folder):
            remove(folder)


def _is_running(pid: int) -> bool:
    if pid == os.getpid():
        return False  # ours, and we are not writing now
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file())


def _write_manifest(folder: Path) -> None:
    files = {}
    for path in _files(folder):
        size = path.stat().st_size
        entry: dict[str, int | str] = {"bytes": size}
        if size <= _HASHED_BYTES:
            entry["sha256"] = _sha256(path)
        files[path.relative_to(folder).as_posix()] = entry
    text = json.dumps({"format": FORMAT, "files": files}, indent=1)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _flush(folder: Path) -> None:
    for path in _files(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    for inner in sorted({p.parent for p in _files(folder)} | {folder}):
        _flush_folder(inner)


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
