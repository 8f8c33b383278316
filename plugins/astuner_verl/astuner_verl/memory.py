"""How much memory of each GPU a run will take: an estimate, for ``astuner run --dry-run``.

VERL keeps float32 weights, float32 gradients and Adam's two moments: 16 bytes a parameter, cut among all GPUs (FSDP 2).
Rollout engines hold the weights once more in half precision, cut among ``tensor_model_parallel_size`` GPUs.  The two
take turns: while one works, the other's share is freed, and the trainer's stays unless it is offloaded.

The formulas are explained, with examples, in ``docs/backbones/verl_gpus.md``.  What they leave out (CUDA's own, about
1 GiB, fragmentation, kernels' workspaces) is why a GPU should have a fifth more.
"""

from __future__ import annotations

from collections.abc import Mapping

from astuner_ray.native.gpu_memory import Shape, gib, memory
from astuner_verl import separate
from astuner_verl.facts import Facts

ENGINE_SHARE = 0.5
"""VERL's ``gpu_memory_utilization`` where nothing is written."""


def estimate(facts: Facts) -> Mapping[str, str]:
    """Lines of the plan; empty for a model whose shape its config does not say in the usual words."""
    shape = Shape.of(facts.described)
    if shape is None:
        return {}
    common, rollout = facts.a.trainer_common, facts.a.rollout
    checkpointing = "trainer_common.activation_checkpointing"  # VERL's is on where ours is not written
    found = memory(
        shape,
        gpus=facts.gpus * common.nnodes,
        tensor_parallel=rollout.tensor_model_parallel_size,
        tokens=facts.micro_batch_tokens,
        checkpointing=common.activation_checkpointing or not facts.is_written(checkpointing),
        lora_rank=facts.a.model.lora.rank,
        param_offload=common.fsdp_config.param_offload,
        optimizer_offload=common.fsdp_config.optimizer_offload,
    )
    share = float(facts.own.get("actor_rollout_ref.rollout.gpu_memory_utilization", ENGINE_SHARE))
    conversation = facts.max_model_len * found.kv_per_token
    engine = (found.rollout_weights + conversation) / share
    trainer: float = found.update
    if not separate.trains_only(facts.own):
        trainer = max(trainer, engine, found.resting / (1 - share))
    apart = separate.written(facts.own)
    each = f"of the trainer, {gib(engine)} on each of the rollout, at least" if apart else "at least"
    stays = "" if apart else f"{gib(found.resting)} of the trainer's stay; "
    return {
        "GPU memory": f"about {gib(trainer)} on each GPU {each}",
        "an update": f"{gib(found.state)} weights, gradients and moments + {gib(found.activations)} activations of "
        f"{facts.micro_batch_tokens:,} tokens = {gib(found.update)}",
        "a rollout": f"{stays}in {share:g} of the GPU: {gib(found.rollout_weights)} weights + {gib(conversation)} "
        f"for each conversation of {facts.max_model_len:,} tokens",
    }
