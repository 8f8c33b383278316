"""Manifests with checksums of folders that are written once, and their verification.

``manifest.json`` has the size and CRC-32 of every file. This detects faulty or full disks and is faster than reading
the
file; it is not a signature. Older manifests have the SHA-256 of small files, and only the size of large ones.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator
from pathlib import Path

from astuner.contracts.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = 1
"""Version of the file format. Readers reject newer versions."""


def write_manifest(folder: Path) -> None:
    """Write a manifest of the folder's current files."""
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "crc32": _crc32(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path != folder / MANIFEST
    }
    (folder / MANIFEST).write_text(json.dumps({"format": FORMAT, "files": files}, indent=1) + "\n", encoding="utf-8")


def problem(folder: Path, *, contents: bool = True) -> str:
    """Return how ``folder`` differs from its manifest, or an empty string.

    :param contents: Also verify checksums; sizes are always compared.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files, version = {**manifest["files"]}, int(manifest["format"])
    except FileNotFoundError:
        return "manifest.json is missing, so it was not written completely"
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        return f"its manifest cannot be read: {error!r}"
    if version > FORMAT:
        return f"its format is {version}, but this version reads up to {FORMAT}: upgrade ASTuner's packages"
    for name, entry in files.items():
        path = folder / name
        try:
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != entry["bytes"]:
                return f"{name} has {path.stat().st_size} bytes instead of {entry['bytes']}"
            for kind, checksum in _CHECKSUMS.items():
                if contents and kind in entry and checksum(path) != entry[kind]:
                    return f"{name} was changed or damaged"
        except (KeyError, TypeError):
            return f"its manifest has no valid entry for {name}"
        except (OSError, ValueError) as error:
            return f"{name} cannot be read: {error}"
    return ""


def require_whole(model: Path) -> None:
    """Verify the checkpoint of a model folder, or of one policy's folder in it, before it is used.

    :raises CheckpointError: A file was changed or damaged.
    """
    for folder in (model, model.parent):
        if folder.name.startswith("step-") and (folder / MANIFEST).is_file() and (why := problem(folder)):
            raise CheckpointError(
                f"{folder} is damaged: {why}. Use another checkpoint, or remove its {MANIFEST} if you changed it"
            )


def _crc32(path: Path) -> int:
    checksum = 0
    for piece in _pieces(path):
        checksum = zlib.crc32(piece, checksum)
    return checksum


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    for piece in _pieces(path):
        digest.update(piece)
    return digest.hexdigest()


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            yield piece


_CHECKSUMS = {"crc32": _crc32, "sha256": _sha256}
