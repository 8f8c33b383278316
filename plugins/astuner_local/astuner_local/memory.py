"""How much memory a config will need, from the model's config alone. An estimate, and said to be one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from astuner.config.schema import TrainerCommon
from astuner_local.modeling import Dimensions, check_supported, read_config, resolve_device, resolve_dtype
from astuner_local.settings import LocalSettings

if TYPE_CHECKING:
    from astuner.config import Config

GIB = 2**30
LEAST_TOKENS = 2048
"""A pass is never smaller than this, however little memory seems free: a sample must fit."""


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


def estimate(config: Config) -> Mapping[str, str]:
    """Lines for the plan: parameters, device, and bytes by what they are for."""
    a = config.astuner
    device = resolve_device(a.model.device)
    dtype = resolve_dtype(a.model.dtype, device)
    model_config = read_config(a.model, path=config.locate_model())
    check_supported(model_config)
    n, dims = parameters_of(model_config), Dimensions.of(model_config)
    width = torch.empty((), dtype=dtype).element_size()
    rank = a.model.lora.rank
    trained = min(n, 2 * rank * dims.layers * 7 * max(dims.hidden, 1) * 2) if rank else n
    has_reference = a.trainer_common.use_kl_loss or a.trainer_common.algorithm.use_kl_in_reward
    moments = 1 if a.trainer_common.optim.optimizer == "muon" else 2
    master = 0 if dtype is torch.float32 else 4
    context = a.rollout.max_model_len or dims.context
    cached = (a.rollout.max_num_seqs or a.rollout.max_env_worker) * context
    settings = config.backbone_section("local")
    if isinstance(settings, LocalSettings) and settings.kv_token_budget is not None:
        cached = min(cached, settings.kv_token_budget)
    at_once = micro_batch_tokens(a.trainer_common, dims, dtype, device)
    tokens = min(at_once, context * a.data.train_batch_size * a.rollout.num_repeat)
    parts = {
        "weights": n * width * (2 if has_reference and not rank else 1),
        "gradients": trained * 4,
        "optimizer": trained * (4 * moments + master),
        "KV cache, at most": cached * dims.layers * dims.kv_heads * dims.head_dim * 2 * width,
        "activations, at most": tokens * _activation_bytes(a.trainer_common, dims, dtype),
    }
    text = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items())
    return {
        "parameters": f"{n:,}{f', about {trained:,} in adapters' if rank else ''} on {device} in {str(dtype)[6:]}",
        "memory (estimate)": f"{sum(parts.values()) / GIB:.2f} GiB: {text}",
    }
