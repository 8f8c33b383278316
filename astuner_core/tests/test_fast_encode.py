"""The short way to token ids and back gives what the long one does, and is not taken where it would not."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from astuner.chat.template import fastest
from astuner.testing import make_tokenizer

TOKENIZER = make_tokenizer()
ENCODE, DECODE = fastest(TOKENIZER)
PIECES = st.sampled_from(["<|im_start|>", "<|im_end|>", "<tool_call>", " ", "\n", "é", "十"]) | st.text(max_size=8)


@given(st.lists(PIECES, max_size=12).map("".join).filter(lambda text: text.isascii() or text.encode("utf-8", "ignore")))
def test_both_ways_give_the_same_ids(text: str) -> None:
    text = text.encode("utf-8", "ignore").decode()  # lone surrogates are replaced before either is asked
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert ENCODE(text) == ids
    for some in (ids, ids[1:], ids[:-1]):
        assert DECODE(some) == TOKENIZER.decode(some, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def test_truncation_that_somebody_left_behind_is_not_obeyed() -> None:
    tokenizer = make_tokenizer()
    encode, _ = fastest(tokenizer)
    tokenizer.backend_tokenizer.enable_truncation(2)
    assert len(encode("abcdef")) == 6


def test_a_tokenizer_that_does_more_than_its_backend_is_asked_itself() -> None:
    class Shouts:
        backend_tokenizer = TOKENIZER.backend_tokenizer
        all_special_tokens = TOKENIZER.all_special_tokens

        def encode(self, text: str, **options: Any) -> list[int]:
            return list(TOKENIZER.encode(text.upper(), add_special_tokens=False))

        def decode(self, ids: list[int], **options: Any) -> str:
            return TOKENIZER.decode(ids).lower()

    encode, decode = fastest(Shouts())
    assert encode("abc") == TOKENIZER.encode("ABC", add_special_tokens=False)
    assert decode(encode("abc")) == "abc"
