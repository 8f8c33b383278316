"""Decode token IDs into one piece of text each, such that the joined pieces are the full text.

A character that consists of several tokens belongs to the last one; the others get "". Invalid bytes become a
replacement character. Byte-level tokenizers (GPT-2 and later) are decoded byte by byte, in linear time for any text;
others use the decoding stream of the tokenizers library.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from astuner.contracts.errors import DataError
from astuner_record.episode_log import tokenizer_file
from astuner_view.runs import about

SEEN_BEFORE = 8
"""Number of preceding tokens given to the library's decoder, which strips the space at the beginning of a text."""
HELD_BACK = 16
"""Tokens without text after which a replacement character is emitted; a valid character has at most 4 bytes."""


class Texts:
    """The decoder of one tokenizer."""

    def __init__(self, path: Path) -> None:
        """Load a tokenizer.

        :param path: a ``tokenizer.json``.
        :raises DataError: the file cannot be read.
        """
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_file(str(path))
            decoder = json.loads(path.read_text(encoding="utf-8")).get("decoder")
        except Exception as e:  # the library raises nothing narrower
            raise DataError(f"{path} is not a valid tokenizer: {e}") from None
        self._is_byte_level = _has(decoder, "ByteLevel")
        added = self._tokenizer.get_added_tokens_decoder()
        self._bytes: dict[int, bytes] = {number: token.content.encode() for number, token in added.items()}

    def pieces(self, ids: Sequence[int], before: Sequence[int] = ()) -> list[str]:
        """Return a piece of text for each ID.

        :param before: the preceding IDs, or the last of them.
        """
        return self._of_bytes(ids) if self._is_byte_level else self._of_stream(ids, before)

    def _of_bytes(self, ids: Sequence[int]) -> list[str]:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        pieces = [decoder.decode(self._bytes_of(number)) for number in ids]
        if pieces:
            pieces[-1] += decoder.decode(b"", True)
        return pieces

    def _bytes_of(self, number: int) -> bytes:
        if number not in self._bytes:
            token = self._tokenizer.id_to_token(number) if number >= 0 else None
            self._bytes[number] = b"" if token is None else _bytes_of(token)
        return self._bytes[number]

    def _of_stream(self, ids: Sequence[int], before: Sequence[int]) -> list[str]:
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=False)
        for number in before[-SEEN_BEFORE:]:
            self._step(stream, number)
        pieces: list[str] = []
        held = 0
        for number in ids:
            piece = self._step(stream, number)
            held = 0 if piece else held + 1
            pieces.append(piece)
            if held == HELD_BACK:
                pieces[-1] = "\ufffd"
                stream, held = DecodeStream(skip_special_tokens=False), 0
        if held and pieces:
            pieces[-1] = self._tokenizer.decode(list(ids[-held:]), skip_special_tokens=False)
        return pieces

    def _step(self, stream: Any, number: int) -> str:
        if number < 0 or self._tokenizer.id_to_token(number) is None:
            return ""
        return stream.step(self._tokenizer, number) or ""


def tokenizer_of(run: Path, policy: str) -> Texts | None:
    """Return the tokenizer of a policy in a run folder; None if it is missing.

    :raises DataError: the file cannot be read.
    """
    path = tokenizer_file(run / "episodes", policy)
    return None if path is None else _texts(path, *about(path))


@lru_cache(maxsize=16)
def _texts(path: Path, *_about: object) -> Texts:
    return Texts(path)


def _has(decoder: Any, kind: str) -> bool:
    if not isinstance(decoder, dict):
        return False
    return decoder.get("type") == kind or any(_has(part, kind) for part in decoder.get("decoders") or ())


def _byte_of_character() -> dict[str, int]:
    """Return GPT-2's alphabet (openai/gpt-2, ``bytes_to_unicode``): a printable character for each byte.

    Printable Latin-1 bytes represent themselves; the others are the characters from 256 on, in order.
    """
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_of_character()


def _bytes_of(token: str) -> bytes:
    if all(character in _BYTES for character in token):
        return bytes(_BYTES[character] for character in token)
    return token.encode("utf-8", "replace")
