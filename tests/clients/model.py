"""The model that the clients talk to: a random Qwen2 of two layers with a long context, and a tokenizer for prose.

`astuner-local`'s own tiny model knows 2,048 positions, and its tokenizer spells English by letters; the prompts of
agent frameworks have thousands of words.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, pre_tokenizers, trainers
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from astuner_local.tiny.tokenizer import END, PAD, START, save
from tests.frameworks.harness import ROOT, thinking_template

CONTEXT = 65_536


def make(folder: Path) -> None:
    """Write tokenizer and weights to ``folder``; the same pages of the documentation give the same model."""
    folder.mkdir(parents=True)
    tokenizer: Tokenizer = Qwen2Tokenizer().backend_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        (p.read_text(encoding="utf-8") for p in sorted((ROOT / "docs").glob("*.md"))), trainer
    )
    save(tokenizer, folder)
    (folder / "chat_template.jinja").write_text(thinking_template(), encoding="utf-8")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=4096,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=128,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
        dtype="float32",
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
