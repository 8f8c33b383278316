"""Check an experiment's models without loading weights, and estimate memory and the time of a step.

All estimates are labeled as such.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from astuner import AgentRegistry, TrainerCommon
from astuner.contracts.errors import ConfigError
from astuner_local.engine.kv_cache import bytes_per_token, default_token_budget
from astuner_local.engine.weights import packs_weights
from astuner_local.modeling import Dimensions, read_all_but_weights, resolve_device, resolve_dtype
from astuner_local.settings import LocalSettings
from astuner_local.speed import product_speed
from astuner_local.trainer.logprobs import DENSE_LIMIT
from astuner_models.serving import make_codec
from astuner_objectives.plan import device_here, disk_plan, speed_plan

if TYPE_CHECKING:
    from astuner import Config

GIB = 2**30
_REACHED = 0.65
"""Share of the matrix product speed that complete steps reached in measurements."""
LEAST_TOKENS = 2048
"""Least tokens of a pass, regardless of free memory, because a sample must fit."""


def checked_config(config: Config, policy: str) -> Any:
    """Return the transformers config of a policy's model after checking that it can be loaded and encoded.

    :raises ConfigError, RunError: It cannot, as in `astuner_local.modeling.load_model` and the engine.
    """
    model, path = config.model_of(policy), config.locate_model(policy=policy)
    resolve_device(model.device)
    model_config, tokenizer = read_all_but_weights(model, path=path)
    folder = Path(path)
    if folder.is_dir() and not any(True for kind in ("*.safetensors", "*.bin") for _ in folder.glob(kind)):
        raise ConfigError(
            f"astuner.model.path is {path}, but that folder has no weights (*.safetensors); copy them next to "
            "config.json, or use the folder of a complete model"
        )
    asked, context = config.astuner.rollout.max_model_len, Dimensions.of(model_config).context
    if asked is not None and asked > context:
        raise ConfigError(
            f"{config.place('astuner.rollout.max_model_len')}: astuner.rollout.max_model_len is {asked}, but the "
            f"context of the model is {context} tokens; use {context} or less"
        )
    make_codec(config, tokenizer)
    return model_config


def parameters_of(model_config: object) -> int:
    """Return the number of parameters of a model, without allocating its weights; tied weights count once."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        build: Any = AutoModelForCausalLM.from_config  # not annotated
        model = build(model_config, attn_implementation="sdpa", trust_remote_code=False)
    return sum(p.numel() for p in model.parameters())


def micro_batch_tokens(common: TrainerCommon, dims: Dimensions, dtype: torch.dtype, device: torch.device) -> int:
    """Return the tokens of one forward and backward pass: as configured, else for a quarter of the free memory."""
    if common.micro_batch_tokens is not None:
        return common.micro_batch_tokens
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4 * GIB
    return max(LEAST_TOKENS, free // 4 // _activation_bytes(common, dims, dtype))


def _activation_bytes(common: TrainerCommon, dims: Dimensions, dtype: torch.dtype) -> int:
    """Return the bytes per token kept for the backward pass.

    For a layer: inputs and outputs of both norms, the gathered q, k and v, the output of attention before and after
    reordering, and in the MLP the gate, its activation, the up projection and their product.
    """
    attention = dims.head_dim * (3 * dims.heads + 2 * dims.kv_heads)
    layer = 4 * dims.hidden + attention + 4 * dims.mlp
    kept = dims.layers * dims.hidden + layer if common.activation_checkpointing else dims.layers * layer
    return kept * dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class _Size:
    """Size of one policy's model, in parameters."""

    path: str
    all: int
    adapters: int
    """Adapter parameters; 0: all weights are trained, if any."""
    dims: Dimensions
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, config: Config, policy: str) -> _Size:
        model, path = config.model_of(policy), config.locate_model(policy=policy)
        device = resolve_device(model.device)
        model_config = checked_config(config, policy)
        n, dims = parameters_of(model_config), Dimensions.of(model_config)
        return cls(
            path=path,
            all=n,
            adapters=min(n, 2 * model.lora.rank * dims.layers * 7 * max(dims.hidden, 1) * 2),
            dims=dims,
            dtype=resolve_dtype(model.dtype, device, dims),
            device=device,
        )

    @property
    def bytes(self) -> int:
        return self.all * self.dtype.itemsize

    def checkpoint(self, optimizer: str) -> int:
        """Return the bytes of a checkpoint: merged weights, adapters, and the optimizer's float32 state."""
        once = (self.adapters or self.dims.linear) if optimizer == "muon" else 0  # Muon's matrices have one moment
        master = 0 if self.adapters or self.dtype is torch.float32 else self.all
        return self.bytes + 4 * (self.adapters + 2 * (self.adapters or self.all) - once + master)

    @property
    def packed(self) -> int:
        """Bytes of the engine's own copy of the weights, if it has one (`engine.weights.packs_weights`)."""
        return (self.dims.linear + self.dims.vocab * self.dims.hidden) * self.dtype.itemsize

    def describe(self, trained: bool) -> str:
        how = f", about {self.adapters:,} in adapters" if self.adapters else ""
        return f"{self.all:,}{how if trained else ', not trained'} on {self.device} in {str(self.dtype)[6:]}"


def estimate(config: Config) -> Mapping[str, str]:
    """Return the plan lines on parameters, memory over all policies, disk and speed."""
    roster, common = AgentRegistry.of(config.astuner), config.astuner.trainer_common
    sizes = {name: _Size.of(config, name) for name in roster.policies}
    trained = [sizes[name] for name in roster.trained_policies]
    several, has_reference = len(sizes) > 1, common.use_kl_loss or common.algorithm.use_kl_in_reward
    own = [s for s in trained if not s.adapters]
    adapted = [s for s in trained if s.adapters]
    frozen = {s.path: s.bytes for s in sizes.values() if s not in own or has_reference}  # loaded once per path
    # The engine merges adapters into its own copy, unless it shares the base with others.
    beside = sum(s.adapters * 4 if several else s.bytes for s in adapted)
    beside += sum(s.packed for s in sizes.values() if s not in adapted and packs_weights(s.dims, s.device, not several))
    learning = sum(s.adapters or s.all for s in trained)
    moments = 1 if common.optim.optimizer == "muon" else 2
    masters = sum(s.all for s in own if s.dtype is not torch.float32)
    parts = {
        "weights": sum(s.bytes for s in own) + sum(frozen.values()) + beside,
        "gradients": learning * 4,
        "optimizer": learning * 4 * moments + masters * 4,
        "KV cache, at most": sum(_cache_bytes(config, s, len(sizes)) for s in sizes.values()),
        "activations, at most": max((_activations(config, s) for s in trained), default=0),
        "Python and libraries": _resident() if any(s.device.type == "cpu" for s in sizes.values()) else 0,
    }
    text = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items())
    each = {name: size.describe(name in roster.trained_policies) for name, size in sizes.items()}
    return {
        "parameters": "; ".join(f"{name}: {size}" if several else size for name, size in each.items()),
        "memory (estimate)": f"{sum(parts.values()) / GIB:.2f} GiB: {text}",
        **_disk_and_speed(config, trained),
        **_time_of_a_step(config, trained),
    }


def _disk_and_speed(config: Config, trained: Sequence[_Size]) -> Mapping[str, str]:
    if not trained:
        return {}
    saved = sum(size.checkpoint(config.astuner.trainer_common.optim.optimizer) for size in trained)
    largest = max(trained, key=lambda size: size.all)
    device = "cpu" if largest.device.type == "cpu" else device_here()
    return {
        **disk_plan(config, checkpoint=saved, state=saved),
        **speed_plan("local", parameters=largest.all, device=device),
    }


def _resident() -> int:
    """Return the bytes of this process in memory, including torch and transformers; 0 if the system does not tell."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


def _time_of_a_step(config: Config, trained: Sequence[_Size]) -> Mapping[str, str]:
    """Return the plan line on the time of a step on a CPU, for models bound by matrix products.

    Combines the measured speed with the number of operations: per weight, a token takes 2 to generate and 6 to train.
    """
    a, threads = config.astuner, LocalSettings.of(config).threads or torch.get_num_threads()
    slow = [s for s in trained if s.device.type == "cpu" and not s.dims.is_small]
    if not slow:
        return {}
    size = max(slow, key=lambda s: s.dims.linear)
    episodes = a.data.train_batch_size * a.rollout.num_repeat
    speed = threads * product_speed(size.dtype)
    pass_seconds = 2 * (size.dims.linear + size.dims.vocab * size.dims.hidden) * episodes * 100 / (speed * _REACHED)
    return {
        "time of a step (estimate)": (
            f"{4 * pass_seconds:.0f} s ({pass_seconds:.0f} s rollout, {3 * pass_seconds:.0f} s update) if each of "
            f"{episodes} episodes has 100 tokens, and proportional to that length; {threads} threads at "
            f"{speed / 1e9:.0f} GF/s in {str(size.dtype)[6:]}"
        )
    }


def _longest(config: Config, size: _Size) -> int:
    """Return the most tokens of an episode."""
    data, context = config.astuner.data, config.astuner.rollout.max_model_len or size.dims.context
    return min(context, (data.max_prompt_length or context) + (data.max_response_length or context))


def _cache_bytes(config: Config, size: _Size, engines: int) -> int:
    rollout, budget = config.astuner.rollout, LocalSettings.of(config).kv_token_budget
    cached = (rollout.max_num_seqs or rollout.max_env_worker) * _longest(config, size)
    per_token = bytes_per_token(size.dims, size.dtype)
    return per_token * min(cached, budget or default_token_budget(per_token, size.device) // engines)


def _activations(config: Config, size: _Size) -> int:
    """Return the bytes of one forward and backward pass: kept activations, and logits with two temporary copies."""
    a = config.astuner
    at_once = micro_batch_tokens(a.trainer_common, size.dims, size.dtype, size.device)
    tokens = min(at_once, _longest(config, size) * a.data.train_batch_size * a.rollout.num_repeat)
    logits = 3 * min(tokens * size.dims.vocab * 4, DENSE_LIMIT)
    return tokens * _activation_bytes(a.trainer_common, size.dims, size.dtype) + logits
