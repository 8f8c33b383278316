"""Tiny models in the shapes of the comparisons, with the shipped tokenizer and template, and a real model."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Shape:
    """Shape of a decoder: a Qwen2 with tied embeddings and a vocabulary of 512 tokens."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int


SHIPPED = Shape(64, 2, 2, 1, 192)
"""Shape of `tiny-calculator`: 0.13 million weights."""
SHAPES = {"tiny": SHIPPED, "0.8M": Shape(128, 4, 4, 2, 384), "3M": Shape(256, 4, 8, 2, 704)}


def shipped_folder() -> str:
    """Return the folder of `tiny-calculator`, which knows an episode's format and solves about one task in seven."""
    from astuner_local.plugin import locate_model

    folder = locate_model("tiny-calculator")
    assert folder is not None, "astuner-local ships tiny-calculator"
    return folder


def real_model_folder() -> str:
    """SmolLM2-135M in float32, or what ASTUNER_BENCHMARK_MODEL names."""
    folder = os.environ.get("ASTUNER_BENCHMARK_MODEL")
    if folder is None:
        from astuner_smollm2.plugin import locate_model

        folder = locate_model("smollm2-135m-float32")
        assert folder is not None, "astuner-smollm2 knows smollm2-135m-float32"
    if not (Path(folder) / "config.json").is_file():
        sys.exit(f"ASTUNER_BENCHMARK_MODEL is {folder}: set it to a folder with a model and its tokenizer")
    return folder


def make(name: str) -> Any:
    """Random weights in the shape ``name``; the same at every call."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape = SHAPES[name]
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.mlp,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        dtype="float32",
        attn_implementation="sdpa",  # type: ignore[call-arg]
    )
    return Qwen2ForCausalLM(config).eval()


def load(path: str | Path, dtype: str = "float32") -> tuple[Any, Any]:
    """Return model and tokenizer of a folder, on the CPU."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), attn_implementation="sdpa").eval()
    return model, AutoTokenizer.from_pretrained(path)


def parameters(model: Any) -> int:
    """Return the number of weights; tied weights count once."""
    return sum(p.numel() for p in model.parameters())


def save(model: Any, folder: str | Path) -> None:
    """Write ``model`` with the shipped tokenizer to a folder that both sides load."""
    from transformers import AutoTokenizer

    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(shipped_folder()).save_pretrained(folder)
