"""Chat templates of real model families, with a tokenizer trained on this repository's text.

The templates are test data (``plugins/astuner_families/tests/templates``, see the README there).  The vocabularies of
these models are not included; a byte-level BPE of a few thousand tokens produces tokens of a realistic length, which
determines the cost.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
DATA = REPOSITORY / "plugins" / "astuner_families" / "tests" / "templates"
FAMILIES: dict[str, dict[str, Any]] = json.loads((DATA / "families.json").read_text(encoding="utf-8"))
NAMES = tuple(name for name, known in FAMILIES.items() if "file" in known and known["calls"])
"""Families whose template presents tools to the model."""
VOCABULARY = 8000
_MORE = {name: ("<tool_response>", "</tool_response>") for name in ("qwen3", "qwen3.5")}
"""Additional tokens of their vocabularies, which the tests do not need."""


@cache
def tokenizer(name: str) -> Any:
    """Return a Hugging Face tokenizer with the family's chat template and special tokens."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    known = FAMILIES[name]
    backend = Tokenizer.from_str(_trained())
    bos = {"bos_token": known["bos"]} if known["bos"] else {}
    backend.add_special_tokens(
        list(dict.fromkeys(["<|endoftext|>", *known["special"], *_MORE.get(name, ()), known["eos"], *bos.values()]))
    )
    build: Any = PreTrainedTokenizerFast  # its constructor is not annotated
    return build(
        tokenizer_object=backend,
        eos_token=known["eos"],
        **bos,
        chat_template=(DATA / known["file"]).read_text(encoding="utf-8"),
        clean_up_tokenization_spaces=False,
    )


@cache
def _trained() -> str:
    """Return a byte-level BPE as JSON, with about as many characters per token on code and English as real models."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    folders = ("astuner_core", "docs", "plugins", "examples")
    files = sorted(p for folder in folders for end in ("py", "md") for p in (REPOSITORY / folder).rglob(f"*.{end}"))
    backend.train(
        [str(p) for p in files],
        trainers.BpeTrainer(
            vocab_size=VOCABULARY, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        ),
    )
    return backend.to_str()
