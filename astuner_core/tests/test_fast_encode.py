"""The short way to token ids gives the ids of the long one, and is not taken where it would not."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from astuner.chat.fast_encode import fastest_encode
from astuner.testing import make_tokenizer

TOKENIZER = make_tokenizer()
ENCODE = fastest_encode(TOKENIZER)
PIECES = st.sampled_from(["<|im_start|>", "<|im_end|>", "<tool_call>", " ", "\n", "é", "十"]) | st.text(max_size=8)


@given(st.lists(PIECES, max_size=12).map("".join).filter(lambda text: text.isascii() or text.encode("utf-8", "ignore")))
def test_both_ways_give_the_same_ids(text: str) -> None:
    text = text.encode("utf-8", "ignore").decode()  # lone surrogates are replaced before either is asked
    assert ENCODE(text) == TOKENIZER.encode(text, add_special_tokens=False)


def test_truncation_that_somebody_left_behind_is_not_obeyed() -> None:
    tokenizer = make_tokenizer()
    encode = fastest_encode(tokenizer)
    tokenizer.backend_tokenizer.enable_truncation(2)
    assert len(encode("abcdef")) == 6


def test_a_tokenizer_that_does_more_than_its_backend_is_asked_itself() -> None:
    class Shouts:
        backend_tokenizer = TOKENIZER.backend_tokenizer
        all_special_tokens = TOKENIZER.all_special_tokens

        def encode(self, text: str, **options: Any) -> list[int]:
            return list(TOKENIZER.encode(text.upper(), add_special_tokens=False))

    assert fastest_encode(Shouts())("abc") == TOKENIZER.encode("ABC", add_special_tokens=False)
