"""The bytes of single tokens.

A token may be part of a character, which decoded alone is U+FFFD.  Vocabularies spell bytes in two ways: as letters of
an alphabet of 256 (byte-level BPE: GPT-2, Llama 3, Qwen), or as ``<0xE2>`` next to pieces whose spaces are U+2581
(SentencePiece: Llama 2, Mistral, Gemma).  Which of them a tokenizer has is found by comparing both with its decoder.

Invariant: the bytes of all tokens of a text, joined, are the text in UTF-8, unless one of them is None.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import Any

_PROBES = ("a", " a b", "Zwölf, 十二, 🙂 = 12.", "  x\n\n\ty", "\U0001f9ff\u0378")
"""Texts with spaces, characters of two to four bytes, and characters that few vocabularies have as one token."""
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"
_LOST = "\ufffd"


def _byte_level(piece: str) -> bytes:
    """The bytes of a piece of byte-level BPE; a piece with other letters, such as an added token, is itself."""
    alphabet = _alphabet()
    known = [alphabet.get(letter) for letter in piece]
    return piece.encode() if None in known else bytes(byte for byte in known if byte is not None)


def _sentence_piece(piece: str) -> bytes:
    """The bytes of a SentencePiece piece."""
    if match := _BYTE_PIECE.fullmatch(piece):
        return bytes([int(match[1], 16)])
    return piece.replace(_SPACE, " ").encode()


@lru_cache(1)
def _alphabet() -> dict[str, int]:
    """Letter -> byte of byte-level BPE, as GPT-2 defines it: printable Latin-1 is itself, the rest follows U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


class TokenBytes:
    """Finds the bytes of token ids of one tokenizer."""

    def __init__(self, tokenizer: Any, encode: Callable[[str], list[int]], decode: Callable[[list[int]], str]) -> None:
        """
        :param encode: Text to ids, without special tokens around it.
        :param decode: Ids to text, special tokens included.
        """
        self._tokenizer, self._encode, self._decode = tokenizer, encode, decode

    def of(self, ids: Sequence[int]) -> list[bytes | None]:
        """Return the bytes of each token; None for a part of a character of a vocabulary in an unknown spelling."""
        if (spelled := self._spelling) is not None:
            parts, text = self._spelled(ids, spelled)
            joined = b"".join(parts)
            if joined == text.encode() or (_LOST in text and _LOST in joined.decode("utf-8", "replace")):
                return list(parts)
        texts = [self._decode([token]) for token in ids]
        return [None if _LOST in text else text.encode() for text in texts]

    def _pieces(self, ids: Sequence[int]) -> list[str]:
        """The pieces as the vocabulary spells them; empty for ids that it does not have."""
        return [piece or "" for piece in self._tokenizer.convert_ids_to_tokens(list(ids))]

    @cached_property
    def _spelling(self) -> Callable[[str], bytes] | None:
        """How the vocabulary spells bytes; None where neither way gives what the tokenizer decodes."""
        return next((each for each in (_byte_level, _sentence_piece) if self._agrees(each)), None)

    def _agrees(self, spelled: Callable[[str], bytes]) -> bool:
        probes = (self._spelled(self._encode(text), spelled) for text in _PROBES)
        return all(b"".join(parts) == text.encode() for parts, text in probes if _LOST not in text)

    def _spelled(self, ids: Sequence[int], spelled: Callable[[str], bytes]) -> tuple[list[bytes], str]:
        """The bytes of each token, and the text of all; SentencePiece's decoders leave out a space in front."""
        parts, text = [spelled(piece) for piece in self._pieces(ids)], self._decode(list(ids))
        joined = b"".join(parts)
        if len(joined) - len(joined.lstrip(b" ")) == len(text) - len(text.lstrip(" ")) + 1:
            first = next(n for n, part in enumerate(parts) if part)
            parts[first] = parts[first][1:]
        return parts, text
