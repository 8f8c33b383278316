"""VERL's mode ``separate_async``, in which rollout engines and trainer use different GPUs.

This module contains all differences from the modes that share GPUs: the number of GPUs and constraints on VERL's
configuration.  Does not import VERL.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omegaconf import DictConfig

MODE = "separate_async"
KEY = "trainer.v1.trainer_mode"
_ROLLOUT = "actor_rollout_ref.rollout"
_HYBRID = "actor_rollout_ref.hybrid_engine"
LENT = "ray_kwargs.ray_init.num_gpus"
"""VERL's key for the number of GPUs in Ray; set by platforms that use logical GPUs."""


def chosen(native: DictConfig) -> bool:
    """Return whether VERL's configuration selects the mode."""
    return bool(native.trainer.v1.trainer_mode == MODE)


def written(keys: Mapping[str, Any]) -> bool:
    """Return whether the user's VERL keys (dotted) select the mode."""
    return keys.get(KEY) == MODE


def trains_only(keys: Mapping[str, Any]) -> bool:
    """Return whether the trainer's GPUs only train; by default VERL also runs engines for validation on them."""
    return written(keys) and keys.get(_HYBRID) is False


def training_gpus(native: DictConfig) -> int:
    """Return the GPUs of a training run on all machines."""
    trainer: int = native.trainer.nnodes * native.trainer.n_gpus_per_node
    return trainer + (_rollout_gpus(native) if chosen(native) else 0)


def serving_gpus(native: DictConfig) -> tuple[int, int]:
    """Return machines and GPUs per machine for rollout servers without a trainer: as many as during training."""
    where = native.actor_rollout_ref.rollout if chosen(native) else native.trainer
    return where.nnodes, where.n_gpus_per_node


def wrong(native: DictConfig) -> Iterator[tuple[str, str]]:
    """Yield problems of this configuration in the mode as pairs of VERL's key and a message."""
    model, rollout = native.actor_rollout_ref.model, native.actor_rollout_ref.rollout
    for name, what in (("nnodes", "machines with rollout engines"), ("n_gpus_per_node", "GPUs for them on each")):
        if rollout[name] < 1:
            yield (
                f"{_ROLLOUT}.{name}",
                f"is {rollout[name]}, but {MODE} needs {what}, in addition to the trainer's; set a number",
            )
    engine = rollout.tensor_model_parallel_size * rollout.data_parallel_size * rollout.pipeline_model_parallel_size
    gpus, on_one = _rollout_gpus(native), rollout.n_gpus_per_node
    if gpus > 0 and (gpus % engine or max(engine, on_one) % min(engine, on_one)):
        yield (
            f"{_ROLLOUT}.n_gpus_per_node",
            f"is {on_one}, but {rollout.nnodes} x {on_one} GPUs cannot be cut into rollout engines of {engine}",
        )
    if rollout.checkpoint_engine.backend in (None, "naive"):
        yield (
            f"{_ROLLOUT}.checkpoint_engine.backend",
            "is naive, which copies new weights only within the same GPU; use nccl (pip install "
            "'verl[cupy-cu130]' installs its dependencies), or another engine that verl supports",
        )
    if native.trainer.v1[MODE].hybrid_rollout.enable_switch:
        yield (
            f"trainer.v1.{MODE}.hybrid_rollout.enable_switch",
            "is true, but ASTuner cannot move groups from the trainer's GPUs to other GPUs within a step; remove it",
        )
    rank = max(model.lora.get("rank", 0), model.lora_rank)
    if rank > 0 and not model.lora.get("merge", False):
        yield (
            "actor_rollout_ref.model.lora.merge",
            f"is false, but VERL 0.9.1 then sends the model without its adapters in {MODE}, so rollouts would not "
            "use what was learned; set true",
        )


def _rollout_gpus(native: DictConfig) -> int:
    rollout = native.actor_rollout_ref.rollout
    gpus: int = rollout.nnodes * rollout.n_gpus_per_node
    return gpus
