"""Pieces of text: joined they are the text, whatever the tokens, and a character is where its last token is."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from astuner.contracts.errors import DataError
from astuner_view.texts import Texts, tokenizer_of

from ._runs import END, byte_tokenizer, ids


@pytest.fixture(scope="module")
def by_bytes(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    return Texts(byte_tokenizer(tmp_path_factory.mktemp("bytes") / "tokenizer.json"))


@pytest.fixture(scope="module")
def by_words(tmp_path_factory: pytest.TempPathFactory) -> tuple[Texts, Tokenizer]:
    """As Llama 2's: a mark for a space, and bytes for what is not in the vocabulary."""
    words = ["▁", "▁the", "▁cat", "s", "▁é", "<unk>"]
    vocab = {word: number for number, word in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    path = tmp_path_factory.mktemp("words") / "tokenizer.json"
    tokenizer.save(str(path))
    return Texts(path), tokenizer


@given(st.text())
def test_pieces_are_the_text_and_each_character_is_on_its_last_byte(by_bytes: Texts, text: str) -> None:
    pieces = by_bytes.pieces(ids(text))
    assert pieces == [piece for c in text for piece in [*[""] * (len(c.encode()) - 1), c]]


@given(st.lists(st.integers(0, END), max_size=30))
def test_bytes_that_are_no_text_are_replaced_and_lose_nothing(by_bytes: Texts, numbers: list[int]) -> None:
    pieces = by_bytes.pieces(numbers)
    assert len(pieces) == len(numbers)
    said = b"".join(b"<|end|>" if n == END else bytes([n]) for n in numbers)
    assert "".join(pieces) == said.decode("utf-8", "replace")


def test_ids_that_nobody_knows_have_no_text(by_bytes: Texts) -> None:
    assert by_bytes.pieces([*ids("a"), 100_000, -5, *ids("b")]) == ["a", "", "", "b"]
    assert by_bytes.pieces([]) == []


def test_a_space_at_the_seam_of_two_turns_is_kept(by_words: tuple[Texts, Tokenizer]) -> None:
    texts, tokenizer = by_words
    the, cat, s = 1, 2, 3
    assert texts.pieces([the, cat, s]) == ["the", " cat", "s"]
    assert texts.pieces([cat, s], before=[the]) == [" cat", "s"]
    assert tokenizer.decode([the, cat, s]) == "the cats"


def test_byte_fallback_puts_a_character_on_its_last_token(by_words: tuple[Texts, Tokenizer]) -> None:
    texts, _ = by_words
    euro = [6 + byte for byte in "€".encode()]
    assert texts.pieces([1, *euro, 3]) == ["the", "", "", "€", "s"]
    assert texts.pieces([1, *euro[:2]])[-1].startswith("\ufffd")


def test_bytes_without_end_are_not_waited_for(by_words: tuple[Texts, Tokenizer]) -> None:
    texts, _ = by_words
    pieces = texts.pieces([6 + 0xE2] * 200 + [2])
    assert len(pieces) == 201
    assert pieces.count("\ufffd") >= 10
    assert "cat" in pieces[-1]


def test_policies_have_their_own_tokenizers_and_names_are_no_paths(tmp_path: Path) -> None:
    run = tmp_path / "run"
    folder = run / "episodes" / "tokenizer"
    assert tokenizer_of(run, "wolves") is None
    byte_tokenizer(folder / "wolves" / "tokenizer.json")
    byte_tokenizer(tmp_path / "elsewhere" / "tokenizer.json")
    assert tokenizer_of(run, "wolves") is not None
    assert tokenizer_of(run, "village") is None
    assert tokenizer_of(run, "../../../elsewhere") is None
    byte_tokenizer(folder / "tokenizer.json")
    assert tokenizer_of(run, "village") is tokenizer_of(run, "../../../elsewhere") is not None
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="is not a valid tokenizer"):
        tokenizer_of(run, "village")
