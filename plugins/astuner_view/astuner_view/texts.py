"""Token ids into the pieces of text that they stand for, one by one, and so that the pieces joined are the text.

A character that several tokens share is the last one's; the others are "".  Where bytes never become a character,
there is a replacement character.  Byte-level tokenizers (GPT-2's and those after it) are read byte by byte, which takes
time in proportion to the tokens whatever a model says; others are left to the library's own stream.
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
"""Tokens before the first one that a decoder of the library is shown: it strips the space of what begins a text."""
HELD_BACK = 16
"""Tokens without a character after which no character is waited for: a real one has at most 4 bytes."""


class Texts:
    """One tokenizer."""

    def __init__(self, path: Path) -> None:
        """
        :param path: a ``tokenizer.json``.
        :raises DataError: it cannot be read.
        """
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_file(str(path))
            decoder = json.loads(path.read_text(encoding="utf-8")).get("decoder")
        except Exception as e:  # the library raises nothing narrower
            raise DataError(f"{path} is no tokenizer: {e}") from None
        self._is_byte_level = _has(decoder, "ByteLevel")
        added = self._tokenizer.get_added_tokens_decoder()
        self._bytes: dict[int, bytes] = {number: token.content.encode() for number, token in added.items()}

    def pieces(self, ids: Sequence[int], before: Sequence[int] = ()) -> list[str]:
        """A text for each id.

        :param before: what stands before them, or its end.
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
    """The tokenizer of a policy that was written into a run folder; None where there is none.

    :raises DataError: it cannot be read.
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
    """GPT-2's alphabet (openai/gpt-2, ``bytes_to_unicode``): a printable character for each byte.

    Printable bytes of Latin-1 stand for themselves, the others for the characters from 256 on, in their order.
    """
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_of_character()


def _bytes_of(token: str) -> bytes:
    if all(character in _BYTES for character in token):
        return bytes(_BYTES[character] for character in token)
    return token.encode("utf-8", "replace")
