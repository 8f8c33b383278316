"""Random tiny models of every supported family, for the tests of the local backbone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

torch.set_num_threads(1)  # tiny products: a second thread gains nothing, and loses much where a neighbour computes

VOCAB = 61

SHAPES: dict[str, dict[str, Any]] = {
    "qwen2": {"model_type": "qwen2", "num_key_value_heads": 1, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 24, "attention_bias": True},
    "qwen3-tied": {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True},
    "llama": {"model_type": "llama", "num_key_value_heads": 4},
    "llama-biased": {"model_type": "llama", "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
    "llama-linear": {"model_type": "llama", "rope_parameters": {"rope_type": "linear", "factor": 3.0}},
    "llama3": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "qwen2-yarn": {
        "model_type": "qwen2",
        "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    },
    "mistral": {"model_type": "mistral", "sliding_window": None, "head_dim": 16},
}


def tiny_config(shape: str, **changes: Any) -> Any:
    fields = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    given = dict(SHAPES[shape], **changes)
    theta = {"rope_theta": 100.0}
    fields.update(given, rope_parameters={"rope_type": "default", **theta, **given.get("rope_parameters", {})})
    return AutoConfig.for_model(**fields)


def tiny_model(shape: str = "qwen2", seed: int = 0, **changes: Any) -> Any:
    """A model whose logits spread widely enough that a wrong cache or position cannot go unnoticed."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(shape, **changes), attn_implementation="sdpa")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.3)
    return model.eval()


def reference_logprobs(model: Any, ids: list[int], temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature) of the transformers forward, [len(ids), vocab]; row i predicts token i + 1."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].float()
    return torch.log_softmax(logits / temperature, -1)
