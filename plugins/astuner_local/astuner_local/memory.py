"""What can be said of an experiment's models without their weights: what is wrong, and how much memory they will need.

The memory is an estimate, and said to be one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from astuner import AgentRegistry, TrainerCommon
from astuner.contracts.errors import ConfigError
from astuner_local.engine.kv_cache import bytes_per_token, default_token_budget
from astuner_local.modeling import Dimensions, read_all_but_weights, resolve_device, resolve_dtype
from astuner_local.settings import LocalSettings
from astuner_models.serving import make_codec

if TYPE_CHECKING:
    from astuner import Config

GIB = 2**30
LEAST_TOKENS = 2048
"""A pass is never smaller than this, however little memory seems free: a sample must fit."""


def checked_config(config: Config, policy: str) -> Any:
    """The transformers config of a policy's model, when its weights can be loaded and its turns encoded.

    :raises ConfigError, RunError: not so, as `astuner_local.modeling.load_model` and the engine refuse it.
    """
    model, path = config.model_of(policy), config.locate_model(policy=policy)
    resolve_device(model.device)
    model_config, tokenizer = read_all_but_weights(model, path=path)
    folder = Path(path)
    if folder.is_dir() and not any(True for kind in ("*.safetensors", "*.bin") for _ in folder.glob(kind)):
        raise ConfigError(
            f"astuner.model.path is {path}, but that folder holds no weights (*.safetensors); copy them beside "
            "config.json, or point it at a complete model"
        )
    asked, context = config.astuner.rollout.max_model_len, Dimensions.of(model_config).context
    if asked is not None and asked > context:
        raise ConfigError(
            f"{config.place('astuner.rollout.max_model_len')}: astuner.rollout.max_model_len is {asked}, but the model "
            f"was made for {context} tokens; write {context} or less"
        )
    make_codec(config, tokenizer)
    return model_config


def parameters_of(model_config: object) -> int:
    """Parameters of a model, built without memory for its weights; tied weights count once."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        build: Any = AutoModelForCausalLM.from_config  # not annotated
        model = build(model_config)
    return sum(p.numel() for p in model.parameters())


def micro_batch_tokens(common: TrainerCommon, dims: Dimensions, dtype: torch.dtype, device: torch.device) -> int:
    """Tokens of one forward and backward pass: as configured, else what a quarter of the free memory holds."""
    if common.micro_batch_tokens is not None:
        return common.micro_batch_tokens
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4 * GIB
    return max(LEAST_TOKENS, free // 4 // _activation_bytes(common, dims, dtype))


def _activation_bytes(common: TrainerCommon, dims: Dimensions, dtype: torch.dtype) -> int:
    """Kept for the backward pass, per token: about 16 hidden-sized tensors a layer, 2 with checkpointing."""
    kept = 2 if common.activation_checkpointing else 16
    return dims.layers * dims.hidden * kept * torch.empty((), dtype=dtype).element_size()


@dataclass(frozen=True, kw_only=True)
class _Size:
    """What one policy's model needs, in parameters."""

    path: str
    all: int
    adapters: int
    """0: all weights are trained, if any are."""
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

    def describe(self, trained: bool) -> str:
        how = f", about {self.adapters:,} in adapters" if self.adapters else ""
        return f"{self.all:,}{how if trained else ', not trained'} on {self.device} in {str(self.dtype)[6:]}"


def estimate(config: Config) -> Mapping[str, str]:
    """Lines for the plan: parameters, device, and bytes by what they are for, over all policies."""
    roster, common = AgentRegistry.of(config.astuner), config.astuner.trainer_common
    sizes = {name: _Size.of(config, name) for name in roster.policies}
    trained = [sizes[name] for name in roster.trained_policies]
    several, has_reference = len(sizes) > 1, common.use_kl_loss or common.algorithm.use_kl_in_reward
    own = [s for s in trained if not s.adapters]
    adapted = [s for s in trained if s.adapters]
    frozen = {s.path: s.bytes for s in sizes.values() if s not in own or has_reference}  # in memory once a path
    # The engine merges adapters into a copy of its own, unless it shares the base with others.
    beside = sum(s.adapters * 4 if several else s.bytes for s in adapted)
    learning = sum(s.adapters or s.all for s in trained)
    moments = 1 if common.optim.optimizer == "muon" else 2
    masters = sum(s.all for s in own if s.dtype is not torch.float32)
    parts = {
        "weights": sum(s.bytes for s in own) + sum(frozen.values()) + beside,
        "gradients": learning * 4,
        "optimizer": learning * 4 * moments + masters * 4,
        "KV cache, at most": sum(_cache_bytes(config, s, len(sizes)) for s in sizes.values()),
        "activations, at most": max((_activations(config, s) for s in trained), default=0),
    }
    text = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items())
    each = {name: size.describe(name in roster.trained_policies) for name, size in sizes.items()}
    return {
        "parameters": "; ".join(f"{name}: {size}" if several else size for name, size in each.items()),
        "memory (estimate)": f"{sum(parts.values()) / GIB:.2f} GiB: {text}",
    }


def _cache_bytes(config: Config, size: _Size, engines: int) -> int:
    rollout, budget = config.astuner.rollout, LocalSettings.of(config).kv_token_budget
    cached = (rollout.max_num_seqs or rollout.max_env_worker) * (rollout.max_model_len or size.dims.context)
    per_token = bytes_per_token(size.dims, size.dtype)
    return per_token * min(cached, budget or default_token_budget(per_token, size.device) // engines)


def _activations(config: Config, size: _Size) -> int:
    a = config.astuner
    at_once = micro_batch_tokens(a.trainer_common, size.dims, size.dtype, size.device)
    context = a.rollout.max_model_len or size.dims.context
    tokens = min(at_once, context * a.data.train_batch_size * a.rollout.num_repeat)
    return tokens * _activation_bytes(a.trainer_common, size.dims, size.dtype)
