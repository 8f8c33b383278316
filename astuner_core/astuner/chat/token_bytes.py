"""Find the bytes of single tokens.

A token may be part of a character, which decodes to U+FFFD on its own. Vocabularies spell bytes in two ways: as letters
of an alphabet of 256 (byte-level BPE: GPT-2, Llama 3, Qwen), or as ``<0xE2>`` next to pieces whose spaces are U+2581
(SentencePiece: Llama 2, Mistral, Gemma). The spelling of a tokenizer is found by comparing both with its decoder.

Invariant: the joined bytes of all tokens of a text are the text in UTF-8, unless one of them is None.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import Any

_PROBES = ("a", " a b", "Zwölf, 十二, 🙂 = 12.", "  x\n\n\ty", "\U0001f9ff\u0378")
"""Texts with spaces, characters of two to four bytes, and characters that are rarely a single token."""
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"
_LOST = "\ufffd"


def _byte_level(piece: str) -> bytes:
    """Return the bytes of a byte-level BPE piece. A piece with other letters, such as an added token, is plain text."""
    alphabet = _alphabet()
    known = [alphabet.get(letter) for letter in piece]
    return piece.encode() if None in known else bytes(byte for byte in known if byte is not None)


def _sentence_piece(piece: str) -> bytes:
    """Return the bytes of a SentencePiece piece."""
    if match := _BYTE_PIECE.fullmatch(piece):
        return bytes([int(match[1], 16)])
    return piece.replace(_SPACE, " ").encode()


@lru_cache(1)
def _alphabet() -> dict[str, int]:
    """Return letter -> byte of byte-level BPE, as in GPT-2: other bytes than printable Latin-1 follow U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


class TokenBytes:
    """Finds the bytes of a tokenizer's token IDs."""

    def __init__(self, tokenizer: Any, encode: Callable[[str], list[int]], decode: Callable[[list[int]], str]) -> None:
        """Keep the functions of a tokenizer.

        :param encode: Text to IDs, without special tokens around it.
        :param decode: IDs to text, including special tokens.
        """
        self._tokenizer, self._encode, self._decode = tokenizer, encode, decode

    def of(self, ids: Sequence[int]) -> list[bytes | None]:
        """Return the bytes of each token; None for a part of a character in an unknown spelling."""
        if (spelled := self._spelling) is not None:
            parts, text = self._spelled(ids, spelled)
            joined = b"".join(parts)
            if joined == text.encode() or (_LOST in text and _LOST in joined.decode("utf-8", "replace")):
                return list(parts)
        texts = [self._decode([token]) for token in ids]
        return [None if _LOST in text else text.encode() for text in texts]

    def _pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the pieces as spelled in the vocabulary; empty for unknown IDs."""
        return [piece or "" for piece in self._tokenizer.convert_ids_to_tokens(list(ids))]

    @cached_property
    def _spelling(self) -> Callable[[str], bytes] | None:
        """The vocabulary's spelling of bytes; None if neither matches the tokenizer's decoder."""
        return next((each for each in (_byte_level, _sentence_piece) if self._agrees(each)), None)

    def _agrees(self, spelled: Callable[[str], bytes]) -> bool:
        probes = (self._spelled(self._encode(text), spelled) for text in _PROBES)
        return all(b"".join(parts) == text.encode() for parts, text in probes if _LOST not in text)

    def _spelled(self, ids: Sequence[int], spelled: Callable[[str], bytes]) -> tuple[list[bytes], str]:
        """Return the bytes of each token and the text of all; SentencePiece decoders omit a leading space."""
        parts, text = [spelled(piece) for piece in self._pieces(ids)], self._decode(list(ids))
        joined = b"".join(parts)
        if len(joined) - len(joined.lstrip(b" ")) == len(text) - len(text.lstrip(" ")) + 1:
            first = next(n for n, part in enumerate(parts) if part)
            parts[first] = parts[first][1:]
        return parts, text
