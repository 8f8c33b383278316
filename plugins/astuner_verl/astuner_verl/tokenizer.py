"""The tokenizer of a model, for the workers and for `serve`."""

from __future__ import annotations

from typing import Any


def load_tokenizer(model: str) -> Any:
    """A Hugging Face tokenizer.

    :param model: a folder, or a name on the hub.
    """
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)
