"""Text to token ids by the shortest way that a tokenizer has.

A Hugging Face tokenizer asks its Rust backend for offsets and masks too, which takes nearly as long as the ids, and
nobody here needs them.  The backend is asked directly where that gives the same ids, which is tried on load.

Invariant: what is returned encodes as ``tokenizer.encode(text, add_special_tokens=False)`` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_TRIED = ("a", " a b", "\n\n a\n", "Zwölf, 十二, 🙂 = 12.", '{"x": [1, -2.5]}', "    return x  # y\t\n")


def fastest_encode(tokenizer: Any) -> Callable[[str], list[int]]:
    """A function from text to ids: special tokens in the text are recognised, and none is added."""

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return ids

    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if not hasattr(backend, "encode_batch_fast"):
        return encode

    def encode_directly(text: str) -> list[int]:
        if backend.truncation is not None or backend.padding is not None:  # somebody else's call left them behind
            return encode(text)
        ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    special = "".join(f"x{token} y" for token in tokenizer.all_special_tokens)
    return encode_directly if all(encode_directly(t) == encode(t) for t in (*_TRIED, special)) else encode
