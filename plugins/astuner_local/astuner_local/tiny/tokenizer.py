"""A tokenizer of 512 tokens: Qwen2's byte-level BPE, trained on transcripts, and a ChatML template with tools.

It is a `Qwen2Tokenizer` except for its vocabulary, so software that loads Qwen2 loads it.  Digits stay single tokens,
so that numbers can be copied; the fixed parts of a tool call are single tokens, so that a call has 15 tokens.  Any text
can be encoded: unseen text falls back to bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer

VOCAB_SIZE = 512
MAX_LENGTH = 2048
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MARKUP = (
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *('{"name": "', '", "arguments": {"', '": "', '"}}', "\\boxed{"),
)
"""Single tokens that stay in the text when it is decoded without special tokens."""


def chat_template() -> str:
    """Return the Jinja source of the chat template."""
    return (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8")


def train(texts: Iterable[str]) -> Tokenizer:
    """Train the tokenizer on rendered transcripts; the same texts give the same tokenizer."""
    tokenizer: Tokenizer = Qwen2Tokenizer().backend_tokenizer
    markup = [AddedToken(token, special=False, normalized=False) for token in MARKUP]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(MARKUP),
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(markup)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the files that `transformers.AutoTokenizer` reads.

    ``save_pretrained`` is not used, so that the files do not depend on its version.
    """
    settings: dict[str, Any] = {
        "tokenizer_class": "Qwen2Tokenizer",
        "bos_token": None,
        "eos_token": END,
        "pad_token": PAD,
        "unk_token": None,
        "padding_side": "left",
        "model_max_length": MAX_LENGTH,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True) + "\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(chat_template(), encoding="utf-8")
