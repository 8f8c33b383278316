"""What a run continues from where an engine saves a folder for each step, and the model that anybody loads.

::

    global_step_120/             the engine's: weights, optimizer, random states
                                 ours: ``astuner.json``, the run's state; without it the folder is not complete;
                                 and ``manifest.json``, the checksums of all that
    checkpoints/step-000120/     a Hugging Face folder; the files are shared with the engine's export (hard links)

Invariant: a folder of these names is complete, or `saved` says what is the matter with it.
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
    """The states in ``folder`` that were written to the end, the newest first, and what is the matter with each.

    Each is read and checked, but for one without a manifest: of before there were any, or of an engine that went on
    writing.
    """
    for state in sorted(_complete_by_name(folder), key=step_of, reverse=True):
        yield state, problem(state) if (state / MANIFEST).exists() else ""


def is_there(folder: Path) -> bool:
    """Return whether a state that was written to the end is in ``folder``, without reading it."""
    return bool(_complete_by_name(folder))


def _complete_by_name(folder: Path) -> list[Path]:
    return [p for p in folder.glob("global_step_*") if _NAME.fullmatch(p.name) and (p / _RUN).is_file()]


def step_of(state: Path) -> int:
    """The step after which a state was saved."""
    return int(state.name.rpartition("_")[2])


def restore(run: Run) -> tuple[int, Mapping[str, Any]]:
    """Put a run where its state says it is; the step, and what `complete` was given. Nothing of a run that begins.

    :raises CheckpointError: the state cannot be read.
    """
    if (state := run.resume_from) is None:
        return 0, {}
    try:
        saved: dict[str, Any] = json.loads((state / _RUN).read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise CheckpointError(
            f"cannot resume from {state}: {_RUN} cannot be read: {e}; to start over, write --no-resume"
        ) from None
    done = step_of(state)
    run.restore(saved["state"], done)
    return done, saved


def complete(state: Path, run: Mapping[str, Any], *, written: bool = True) -> None:
    """Mark a state as complete, with what the run itself continues from in it; the others are removed.

    :param written: the engine's files are all there, so that their checksums can be written with them.
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
    """Make ``checkpoints/step-NNNNNN`` of an engine's Hugging Face folder; None where that holds no weights.

    :param keep: only the newest so many stay, and the best validated one; None: all.
    :param finish: gets the copy, whose files may be links, before it has its name.
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
    """A hard link, or a copy where the file system has none."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target
