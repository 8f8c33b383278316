"""Checkpoints of a run on verl: what verl needs to go on, and a model that anybody loads.

::

    resume/global_step_120/      verl's: sharded weights, optimizer, random states (``actor/``), ``data.pt``
                                 ours: ``astuner.json``, the run's books; without it the folder is not complete
    checkpoints/step-000120/     a Hugging Face folder; the files are shared with verl's export (hard links)

Invariant: a folder of these names is complete, or `latest_state` passes over it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl.trainer.ppo.checkpoint_callback import CheckpointCallback

from astuner.errors import CheckpointError
from astuner_verl.adapters import has_adapters, merge

_NAME = re.compile(r"global_step_(\d+)")
_STATE = "astuner.json"
_LORA = "lora_train_meta.json"
"""VERL's, beside its export of a model with adapters."""


class SaveCallback(CheckpointCallback):
    """verl calls it after each checkpoint; set as ``trainer.checkpoint_callback_class``."""

    def on_save(
        self, trainer: Any, global_step: int, checkpoint_dir: str, async_save: bool = False, **kwargs: Any
    ) -> None:
        from astuner_verl import session

        session.current().saved(global_step, Path(checkpoint_dir).absolute())


def latest_state(folder: Path) -> Path | None:
    """The newest complete state in a run's ``resume`` folder."""
    complete = [p for p in folder.glob("global_step_*") if _NAME.fullmatch(p.name) and (p / _STATE).is_file()]
    return max(complete, key=step_of, default=None)


def step_of(state: Path) -> int:
    """The step after which a state was saved."""
    return int(state.name.rpartition("_")[2])


def read_state(state: Path) -> dict[str, Any]:
    """The run's books as they were saved.

    :raises CheckpointError: they cannot be read.
    """
    try:
        books: dict[str, Any] = json.loads((state / _STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise CheckpointError(
            f"cannot resume from {state}: {_STATE} cannot be read: {e}; to start over, write --no-resume"
        ) from None
    return books


def complete(state: Path, books: Mapping[str, Any]) -> None:
    """Mark a state as complete, with the run's books in it; earlier states are removed."""
    temporary = state / f".{_STATE}.tmp"
    temporary.write_text(json.dumps(books) + "\n", encoding="utf-8")
    temporary.replace(state / _STATE)
    for other in state.parent.glob("global_step_*"):
        if _NAME.fullmatch(other.name) and other != state:
            shutil.rmtree(other)


def publish(state: Path, checkpoints: Path, *, keep: int | None) -> Path | None:
    """Make ``checkpoints/step-NNNNNN`` of verl's export; None where verl exported no weights.

    :param keep: only the newest so many stay; None: all.
    """
    export = state / "actor" / "huggingface"
    if not any(export.glob("*.safetensors")):
        return None
    target = checkpoints / f"step-{step_of(state):06d}"
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(export, temporary, copy_function=_link)
    if has_adapters(export):
        lora = json.loads((state / "actor" / _LORA).read_text(encoding="utf-8"))
        merge(export, temporary, scale=lora["lora_alpha"] / lora["r"])
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)
    for old in sorted(checkpoints.glob("step-*"))[: -keep if keep else 0]:
        shutil.rmtree(old)
    return target


def _link(source: str, target: str) -> str:
    """A hard link, or a copy where the file system has none."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target
