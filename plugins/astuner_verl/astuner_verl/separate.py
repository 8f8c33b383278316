"""VERL's mode ``separate_async``: rollout engines have GPUs of their own, beside those of the trainer.

Everything that differs from the modes in which they share GPUs is here: how many GPUs a run needs, and what VERL's
configuration must say.  Light; VERL is not imported.
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
"""VERL's key for the GPUs that Ray is told of; set by platforms that lend logical ones."""


def chosen(native: DictConfig) -> bool:
    """Whether VERL's configuration asks for the mode."""
    return bool(native.trainer.v1.trainer_mode == MODE)


def written(keys: Mapping[str, Any]) -> bool:
    """Whether the person's keys of VERL (dotted) ask for the mode."""
    return keys.get(KEY) == MODE


def trains_only(keys: Mapping[str, Any]) -> bool:
    """Whether they leave the trainer's GPUs to the trainer; otherwise VERL has engines there too, for validations."""
    return written(keys) and keys.get(_HYBRID) is False


def training_gpus(native: DictConfig) -> int:
    """GPUs of a training run, of all machines."""
    trainer: int = native.trainer.nnodes * native.trainer.n_gpus_per_node
    return trainer + (_rollout_gpus(native) if chosen(native) else 0)


def serving_gpus(native: DictConfig) -> tuple[int, int]:
    """Machines, and GPUs on each, of rollout servers without a trainer: as many as generate during a training run."""
    where = native.actor_rollout_ref.rollout if chosen(native) else native.trainer
    return where.nnodes, where.n_gpus_per_node


def wrong(native: DictConfig) -> Iterator[tuple[str, str]]:
    """What the mode cannot do with this configuration: VERL's key to blame, and the message."""
    model, rollout = native.actor_rollout_ref.model, native.actor_rollout_ref.rollout
    for name, what in (("nnodes", "machines with rollout engines"), ("n_gpus_per_node", "GPUs for them on each")):
        if rollout[name] < 1:
            yield (
                f"{_ROLLOUT}.{name}",
                f"is {rollout[name]}, and {MODE} needs {what}, beside the trainer's; write a number",
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
            "is naive, which brings new weights no further than to the same GPU; write nccl (pip install "
            "'verl[cupy-cu130]' brings what it needs), or another one that VERL knows",
        )
    if native.trainer.v1[MODE].hybrid_rollout.enable_switch:
        yield (
            f"trainer.v1.{MODE}.hybrid_rollout.enable_switch",
            "is true, and ASTuner's groups cannot be handed from the trainer's GPUs to the others within a step; "
            "leave it out",
        )
    rank = max(model.lora.get("rank", 0), model.lora_rank)
    if rank > 0 and not model.lora.get("merge", False):
        yield (
            "actor_rollout_ref.model.lora.merge",
            f"is false, and VERL 0.9.1 sends the model without its adapters then in {MODE}, so that nothing learnt "
            "would be rolled out; write true",
        )


def _rollout_gpus(native: DictConfig) -> int:
    rollout = native.actor_rollout_ref.rollout
    gpus: int = rollout.nnodes * rollout.n_gpus_per_node
    return gpus
