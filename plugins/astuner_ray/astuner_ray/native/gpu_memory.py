"""Estimate the GPU memory of training and rollouts for ``astuner run --dry-run``.

A trainer keeps float32 weights, float32 gradients and Adam's two moments: 16 bytes per parameter, sharded over all of
its GPUs (FSDP 2).  Rollout engines hold another copy of the weights in half precision, split over
``tensor_model_parallel_size`` GPUs.  The backbone determines which of the two share a GPU.

``docs/backbones/verl_gpus.md`` explains the formulas with examples.  They omit CUDA's own memory (about 1 GiB),
fragmentation and kernel workspaces, so a GPU should have 20 % more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from astuner_objectives.plan import gib as gib

if TYPE_CHECKING:
    from astuner_ray.native.facts import Facts

GIB = 2**30
MASTER = 4
"""Bytes of a weight that the optimizer updates."""
TRAINED = 12
"""Additional bytes of a trained weight: its gradient (4) and Adam's two moments (8)."""
HALF = 2
"""Bytes of a number in forward passes and rollouts."""
LOGIT = 8
"""Bytes per token and vocabulary entry: logits, their softmax and the gradients of loss and entropy, in bfloat16."""
LAYER = 34
"""Bytes that a layer keeps for its backward pass, per token and unit of hidden size (Korthikanti et al. 2022,
section 4: 34 s b h, without terms that flash attention avoids)."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Properties of a model that determine its memory."""

    parameters: int
    layers: int
    hidden: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    def adapters(self, rank: int) -> int:
        """Return the weights of adapters on all seven matrices of a layer, with an MLP three hidden sizes wide."""
        return self.layers * rank * 16 * self.hidden

    @classmethod
    def of(cls, described: Mapping[str, Any]) -> Shape | None:
        """Return the shape of a decoder's ``config.json``; None if keys are missing."""
        said = {**described, **(described.get("text_config") or {})}
        try:
            hidden, layers, heads = said["hidden_size"], said["num_hidden_layers"], said["num_attention_heads"]
            vocabulary, inner = said["vocab_size"], said["intermediate_size"]
        except KeyError:
            return None
        kv_heads = said.get("num_key_value_heads") or heads
        head_dim = said.get("head_dim") or hidden // heads
        experts = said.get("num_experts") or said.get("num_local_experts") or 0
        feed_forward = 3 * hidden * inner
        if experts:
            feed_forward = experts * 3 * hidden * (said.get("moe_intermediate_size") or inner)
        attention = 2 * hidden * head_dim * (heads + kv_heads)
        embeddings = vocabulary * hidden * (1 if said.get("tie_word_embeddings") else 2)
        return cls(
            parameters=embeddings + layers * (attention + feed_forward + 2 * hidden),
            layers=layers,
            hidden=hidden,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocabulary=vocabulary,
        )


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on each GPU."""

    state: int
    """Weights, gradients and moments on this GPU during an update."""
    activations: int
    """Activations of one pass over a micro-batch, including the gathered layer."""
    resting: int
    """Trainer memory that stays on the GPU during a rollout."""
    rollout_weights: int
    kv_per_token: int
    """Cache per token of a conversation."""

    @property
    def update(self) -> int:
        """Peak memory of an update."""
        return self.state + self.activations

    def of_update(self, tokens: int) -> str:
        """Return `update` and its parts as text."""
        return (
            f"{gib(self.state)} weights, gradients and moments + {gib(self.activations)} activations of {tokens:,} "
            f"tokens = {gib(self.update)}"
        )


def memory(
    shape: Shape,
    *,
    gpus: int,
    tensor_parallel: int = 1,
    tokens: int,
    checkpointing: bool = True,
    lora_rank: int = 0,
    param_offload: bool = False,
    optimizer_offload: bool = False,
) -> Memory:
    """Estimate the memory on each GPU.

    :param gpus: GPUs of all machines.
    :param tokens: Tokens of one pass on one GPU.
    :param lora_rank: 0 trains all weights; adapters are on every matrix of a layer.
    """
    adapters = shape.adapters(lora_rank)
    trained = adapters or shape.parameters
    weights = MASTER * (shape.parameters + adapters)
    kept = tokens * shape.hidden * HALF * shape.layers  # the input of every layer
    layer = tokens * shape.hidden * LAYER
    per_layer = (shape.parameters - shape.vocabulary * shape.hidden) // shape.layers
    passes = (kept + layer if checkpointing else layer * shape.layers) + LOGIT * tokens * shape.vocabulary
    offloaded = (weights if param_offload else 0) + (8 * trained if optimizer_offload else 0)
    return Memory(
        state=(weights + TRAINED * trained) // gpus,
        activations=passes + 2 * HALF * per_layer,  # one layer is computed while the next one is gathered
        resting=(weights + 8 * trained - offloaded) // gpus,
        rollout_weights=HALF * shape.parameters // tensor_parallel,
        kv_per_token=2 * HALF * shape.layers * shape.kv_heads * shape.head_dim // tensor_parallel,
    )


def of_facts(facts: Facts, *, gpus: int) -> Memory | None:
    """Return the `memory` of an experiment; None if the model's config does not give its shape.

    :param gpus: Training GPUs of all machines.
    """
    shape = Shape.of(facts.described)
    if shape is None:
        return None
    common, checkpointing = facts.a.trainer_common, "trainer_common.activation_checkpointing"
    return memory(
        shape,
        gpus=gpus,
        tensor_parallel=facts.a.rollout.tensor_model_parallel_size,
        tokens=facts.micro_batch_tokens,
        checkpointing=common.activation_checkpointing or not facts.is_written(checkpointing),  # engines enable it
        lora_rank=facts.a.model.lora.rank,
        param_offload=common.fsdp_config.param_offload,
        optimizer_offload=common.fsdp_config.optimizer_offload,
    )
