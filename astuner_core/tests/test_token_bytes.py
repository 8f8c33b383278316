"""The bytes of single tokens, joined, are the text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from astuner.chat.template import fastest
from astuner.chat.token_bytes import TokenBytes
from tests.table import table

TEXTS = (
    "a",
    "ab  c",
    " ab",
    "ü",
    "a😀ü",
    "👩‍👩‍👧 x",
    "汉字",
    "\x00\x7f\n\t",
    "a<|im_end|>b",
    "é\u0301 \ufeff",
    "▁a",
    "Ġa",
)
WORDS = ("a", "b", "▁a", "▁ab", "▁", "ab", "ü")


def byte_level(*, prefix: bool = False, decoder: Any = None) -> Tokenizer:
    """As GPT-2, Qwen and Llama 3."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: n for n, letter in enumerate([*alphabet, "ab", "Ġa"])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b"), ("Ġ", "a")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)
    backend.decoder = decoder or decoders.ByteLevel()
    backend.add_special_tokens(["<|im_end|>"])
    return backend


def with_names_in_other_scripts() -> Tokenizer:
    """As DeepSeek, whose special tokens hold letters that stand for no byte."""
    backend = byte_level()
    backend.add_special_tokens(["<｜end▁of▁sentence｜>"])
    return backend


def sentence_piece(*, legacy: bool = False) -> Tokenizer:
    """As Mistral and, ``legacy``, Llama 2: bytes that no piece has are `<0xE2>`."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    merges = [("▁", "a"), ("a", "b")]
    vocabulary = {piece: n for n, piece in enumerate(pieces)}
    bpe = models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    backend = Tokenizer(bpe)
    if legacy:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens([AddedToken("<|im_end|>", normalized=False, special=True)])
    return backend


def without_first_space() -> Tokenizer:
    """As Gemma, whose decoder keeps a space in front."""
    backend = sentence_piece()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="never", split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def unigram() -> Tokenizer:
    """As T5's newer relatives: a unigram model with byte pieces."""
    pieces = [("<unk>", 0.0), *((f"<0x{byte:02X}>", -9.0) for byte in range(256)), *((word, -2.0) for word in WORDS)]
    backend = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="never")
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never")])
    backend.add_special_tokens(["<|im_end|>"])
    return backend


def split_by_words() -> Tokenizer:
    """As tiktoken's vocabularies: a pattern cuts before the bytes are looked up."""
    backend = byte_level()
    words = pre_tokenizers.Split(Regex(r" ?\w+|\s+|[^\w\s]+"), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return backend


KINDS: list[tuple[str, Callable[[], Tokenizer]]] = [
    ("byte-level BPE", byte_level),
    ("byte-level BPE with names in other scripts", with_names_in_other_scripts),
    ("byte-level BPE behind a pattern", split_by_words),
    ("byte-level BPE in a sequence", lambda: byte_level(decoder=decoders.Sequence([decoders.ByteLevel()]))),
    ("SentencePiece", sentence_piece),
    ("SentencePiece, a space before every text", lambda: sentence_piece(legacy=True)),
    ("SentencePiece without a space in front", without_first_space),
    ("unigram with byte pieces", unigram),
]


def bytes_of(backend: Tokenizer) -> tuple[TokenBytes, Callable[[str], list[int]], Callable[[list[int]], str]]:
    from transformers import PreTrainedTokenizerFast

    build: Any = PreTrainedTokenizerFast
    tokenizer = build(tokenizer_object=backend, clean_up_tokenization_spaces=False)
    encode, decode = fastest(tokenizer)
    return TokenBytes(tokenizer, encode, decode), encode, decode


@table("kind, make", KINDS, ids=str)
def test_the_bytes_of_all_tokens_are_the_text(kind: str, make: Callable[[], Tokenizer]) -> None:
    found, encode, decode = bytes_of(make())
    for text in TEXTS:
        ids = encode(text)
        whole = decode(ids)
        parts = found.of(ids)
        assert None not in parts, text
        assert b"".join(part or b"" for part in parts) == whole.encode(), text
        for n in range(1, len(ids)):  # of a reply that was cut inside a character, too
            assert whole.encode().startswith(b"".join(part or b"" for part in found.of(ids[:n]))), text


@table("kind, make", KINDS, ids=str)
def test_a_part_of_a_character_has_its_own_bytes(kind: str, make: Callable[[], Tokenizer]) -> None:
    found, encode, _ = bytes_of(make())
    parts = [part for part in found.of(encode("a😀")) if part not in (b"a", b"")]
    assert parts == [bytes([byte]) for byte in "😀".encode()]


def test_a_special_token_and_an_id_of_nothing() -> None:
    found, encode, _ = bytes_of(with_names_in_other_scripts())
    (end,) = encode("<｜end▁of▁sentence｜>")
    assert found.of([end, 100_000]) == ["<｜end▁of▁sentence｜>".encode(), b""]
    assert found.of([]) == []


def test_a_vocabulary_in_another_spelling_has_no_bytes_for_parts() -> None:
    pieces = {"<unk>": 0, "[f0]": 1, "[9f]": 2, "a": 3}
    backend = Tokenizer(models.WordLevel(vocab=pieces, unk_token="<unk>"))
    backend.decoder = decoders.Sequence([decoders.Replace("[f0]", "\ufffd"), decoders.Replace("[9f]", "\ufffd")])
    found, _, _ = bytes_of(backend)
    assert found.of([3, 1]) == [b"a", None]
