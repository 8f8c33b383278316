"""Saved states of engines that write one folder per step, and the published checkpoints.

::

    global_step_120/             written by the engine: weights, optimizer, random states;
                                 ``astuner.json`` with the run's state is added last: without it the folder is
                                 incomplete; ``manifest.json`` holds the checksums of all files
    checkpoints/step-000120/     Hugging Face folder; its files are hard links to the engine's export

Invariant: a folder with such a name is complete, or `saved` reports the problem.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from astuner import RunDir
from astuner.contracts.errors import CheckpointError
from astuner_objectives.manifest import MANIFEST, problem, write_manifest

if TYPE_CHECKING:
    from astuner.contracts.run import Run

_NAME = re.compile(r"global_step_(\d+)")
_RUN = "astuner.json"


def saved(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield the complete states in ``folder``, newest first, each with its problem (empty if intact).

    Checksums are verified.  A state without a manifest is not: older versions wrote none, and an engine that was still
    writing has none.
    """
    for state in sorted(_complete_by_name(folder), key=step_of, reverse=True):
        yield state, problem(state) if (state / MANIFEST).exists() else ""


def is_there(folder: Path) -> bool:
    """Return whether ``folder`` contains a complete state, without reading it."""
    return bool(_complete_by_name(folder))


def _complete_by_name(folder: Path) -> list[Path]:
    return [p for p in folder.glob("global_step_*") if _NAME.fullmatch(p.name) and (p / _RUN).is_file()]


def step_of(state: Path) -> int:
    """Return the step after which a state was saved."""
    return int(state.name.rpartition("_")[2])


def restore(run: Run) -> tuple[int, Mapping[str, Any]]:
    """Restore a run from its saved state and return the step and the dictionary that `complete` wrote.

    Returns ``(0, {})`` for a new run.

    :raises CheckpointError: The state cannot be read.
    """
    if (state := run.resume_from) is None:
        return 0, {}
    try:
        saved: dict[str, Any] = json.loads((state / _RUN).read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise CheckpointError(
            f"cannot resume from {state}: {_RUN} is not readable: {e}; to start over, use --no-resume"
        ) from None
    done = step_of(state)
    run.restore(saved["state"], done)
    return done, saved


def complete(state: Path, run: Mapping[str, Any], *, written: bool = True) -> None:
    """Mark a state as complete, store the run's own state in it and remove older states.

    :param written: Whether the engine has written all its files, so that their checksums can be stored.
    """
    (state / MANIFEST).unlink(missing_ok=True)
    RunDir.write_atomically(state / _RUN, json.dumps(run) + "\n")
    if written:
        write_manifest(state)
    for other in state.parent.glob("global_step_*"):
        if _NAME.fullmatch(other.name) and other != state:
            shutil.rmtree(other)


def publish(
    export: Path,
    checkpoints: Path,
    step: int,
    *,
    keep: int | None,
    finish: Callable[[Path], None] = lambda folder: None,
) -> Path | None:
    """Write ``checkpoints/step-NNNNNN`` from an engine's Hugging Face folder; return None if it has no weights.

    :param keep: Number of newest checkpoints to keep, in addition to the best validated one; None keeps all.
    :param finish: Called with the copy, whose files may be links, before it gets its final name.
    """
    if not any(export.glob("*.safetensors")):
        return None
    target = checkpoints / f"step-{step:06d}"
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(export, temporary, copy_function=_link)
    finish(temporary)
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)
    best = RunDir(checkpoints.parent).best
    for old in sorted(checkpoints.glob("step-*"))[: -keep if keep else 0]:
        if old != best:
            shutil.rmtree(old)
    return target


def _link(source: str, target: str) -> str:
    """Create a hard link, or a copy if the file system does not support links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target
