"""Text to token ids and back by the shortest way that a tokenizer has.

A Hugging Face tokenizer asks its Rust backend for offsets and masks too, which takes nearly as long as the ids, and
nobody here needs them; what it is to decode it looks through first, for tensors.  The backend is asked directly where
that gives the same, which is tried on load.

Invariant: what is returned encodes as ``tokenizer.encode(text, add_special_tokens=False)`` does, and decodes as
``tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_TRIED = ("a", " a b", "\n\n a\n", "Zwölf, 十二, 🙂 = 12.", '{"x": [1, -2.5]}', "    return x  # y\t\n")


def fastest(tokenizer: Any) -> tuple[Callable[[str], list[int]], Callable[[list[int]], str]]:
    """Two functions, from text to ids and back; special tokens are recognised and shown, and none is added."""

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return ids

    def decode(ids: list[int]) -> str:
        text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if not hasattr(backend, "encode_batch_fast"):
        return encode, decode

    def encode_directly(text: str) -> list[int]:
        if backend.truncation is not None or backend.padding is not None:  # somebody else's call left them behind
            return encode(text)
        ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def decode_directly(ids: list[int]) -> str:
        text: str = backend.decode(ids, skip_special_tokens=False)
        return text

    texts = (*_TRIED, "".join(f"x{token} y" for token in tokenizer.all_special_tokens))
    tried = [encode(text) for text in texts]
    same_ids = [encode_directly(text) for text in texts] == tried
    same_text = all(decode_directly(part) == decode(part) for ids in tried for part in (ids, ids[1:], ids[:-1]))
    return encode_directly if same_ids else encode, decode_directly if same_text else decode
