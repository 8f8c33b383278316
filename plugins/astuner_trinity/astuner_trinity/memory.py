"""How much memory of each GPU a run will take: an estimate, for ``astuner run --dry-run``.

Rollout engines and training have GPUs of their own: an engine may fill ``gpu_memory_utilization`` of its GPUs with
weights and cache, and the trainer's state and activations have theirs to themselves.  The arithmetic is
`astuner_ray.native.gpu_memory`'s.
"""

from __future__ import annotations

from collections.abc import Mapping

from astuner_ray.native.gpu_memory import Shape, gib, memory
from astuner_trinity.facts import ENGINE, Facts

ENGINE_SHARE = 0.9
"""Trinity's ``gpu_memory_utilization`` where nothing is written."""
COLOCATED_SHARE = 0.25
"""The most that Trinity gives an engine which shares its GPU with training."""


def estimate(facts: Facts) -> Mapping[str, str]:
    """Lines of the plan; the memory only for a model whose shape its config says in the usual words."""
    lines = {"GPUs": _gpus(facts)}
    shape = Shape.of(facts.described)
    if shape is None:
        return lines
    common = facts.a.trainer_common
    checkpointing = "trainer_common.activation_checkpointing"  # Trinity's is on where ours is not written
    found = memory(
        shape,
        gpus=facts.training_gpus,
        tensor_parallel=facts.a.rollout.tensor_model_parallel_size,
        tokens=facts.micro_batch_tokens,
        checkpointing=common.activation_checkpointing or not facts.is_written(checkpointing),
    )
    share = _engine_share(facts)
    conversation = facts.max_model_len * found.kv_per_token
    engine = (found.rollout_weights + conversation) / share
    lines["a rollout engine"] = (
        f"in {share:g} of each of its GPUs: {gib(found.rollout_weights)} weights + {gib(conversation)} for each "
        f"conversation of {facts.max_model_len:,} tokens, so {gib(engine)} at least"
    )
    lines["an update"] = (
        f"{gib(found.state)} weights, gradients and moments + {gib(found.activations)} activations of "
        f"{facts.micro_batch_tokens:,} tokens = {gib(found.update)}"
    )
    return lines


def _gpus(facts: Facts) -> str:
    if facts.mode == "colocate":
        return "1 for rollouts and training"
    helpers = f", {facts.helper_gpus} for auxiliary models" if facts.helper_gpus else ""
    rollouts = f"{facts.engines} x {facts.engine_gpus} for rollouts{helpers}"
    return f"{facts.world}: {rollouts}, {facts.training_gpus} for training"


def _engine_share(facts: Facts) -> float:
    said = float(facts.own.get(f"{ENGINE}.gpu_memory_utilization") or ENGINE_SHARE)
    return min(said, COLOCATED_SHARE) if facts.mode == "colocate" else said
