"""Checkpoints of a run on verl: ``resume/global_step_N`` and ``checkpoints/step-N`` of `astuner_ray.step_states`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from verl.trainer.ppo.checkpoint_callback import CheckpointCallback

from astuner_ray import step_states
from astuner_verl.adapters import has_adapters, merge

_LORA = "lora_train_meta.json"
"""VERL's, beside its export of a model with adapters."""


class SaveCallback(CheckpointCallback):
    """verl calls it after each checkpoint; set as ``trainer.checkpoint_callback_class``."""

    def on_save(
        self, trainer: Any, global_step: int, checkpoint_dir: str, async_save: bool = False, **kwargs: Any
    ) -> None:
        from astuner_verl import session

        session.current().saved(global_step, Path(checkpoint_dir).absolute())


def publish(state: Path, checkpoints: Path, *, keep: int | None) -> Path | None:
    """Make ``checkpoints/step-NNNNNN`` of verl's export, with adapters merged; None where verl exported no weights."""
    export = state / "actor" / "huggingface"

    def merged(folder: Path) -> None:
        if has_adapters(export):
            lora = json.loads((state / "actor" / _LORA).read_text(encoding="utf-8"))
            merge(export, folder, scale=lora["lora_alpha"] / lora["r"])

    return step_states.publish(export, checkpoints, step_states.step_of(state), keep=keep, finish=merged)
