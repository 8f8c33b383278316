"""How much memory a config will need, from the model's config alone. An estimate, and said to be one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from astuner_local.modeling import Dimensions, check_supported, read_config, resolve_device, resolve_dtype
from astuner_local.settings import LocalSettings

if TYPE_CHECKING:
    from astuner.config import Config

GIB = 2**30


def parameters_of(model_config: object) -> int:
    """Parameters of a model, built without memory for its weights; tied weights count once."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        build: Any = AutoModelForCausalLM.from_config  # not annotated
        model = build(model_config)
    return sum(p.numel() for p in model.parameters())


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
    tokens = a.trainer_common.micro_batch_tokens or min(
        context * a.data.train_batch_size * a.rollout.num_repeat, 64 * context
    )
    parts = {
        "weights": n * width * (2 if has_reference and not rank else 1),
        "gradients": trained * 4,
        "optimizer": trained * (4 * moments + master),
        "KV cache, at most": cached * dims.layers * dims.kv_heads * dims.head_dim * 2 * width,
        "activations, at most": tokens
        * dims.layers
        * dims.hidden
        * (2 if a.trainer_common.activation_checkpointing else 16)
        * width,
    }
    text = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items())
    return {
        "parameters": f"{n:,}{f', about {trained:,} in adapters' if rank else ''} on {device} in {str(dtype)[6:]}",
        "memory (estimate)": f"{sum(parts.values()) / GIB:.2f} GiB: {text}",
    }
