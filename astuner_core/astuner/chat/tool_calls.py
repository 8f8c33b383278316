"""Tool calls as models write them: what all families share, and the Hermes format of Qwen2.5 and Qwen3.

A Hermes call is ``<tool_call>`` + a JSON object with ``name`` and ``arguments`` + ``</tool_call>``
(https://github.com/NousResearch/Hermes-Function-Calling).  Nothing is repaired: a block that is not exactly that
stays in the text, and is listed so that a check can see it.  The arguments of a good block are the model's own
characters, not a second serialisation of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from astuner.chat.messages import parse_arguments

OPEN, CLOSE = "<tool_call>", "</tool_call>"

_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class ToolCall:
    """One call as the model wrote it."""

    name: str
    arguments: str
    """A JSON object, in the model's own spelling."""
    id: str = ""
    """The id that the model gave it, in families whose models do."""


Tools: TypeAlias = Sequence[Mapping[str, Any]]
"""OpenAI-style tool descriptions."""
ReadCalls: TypeAlias = tuple[str, list[ToolCall], list[str]]
"""What surrounds the calls, the calls, and the blocks that cannot be read."""
ReadBlock: TypeAlias = Callable[[str, int], "tuple[ToolCall, int] | None"]
"""Reads the block that begins at an index; gives the call and the index behind its closing tag, or None."""


def read_tool_calls(text: str) -> ReadCalls:
    """Split ``text`` into what surrounds its Hermes calls, the calls, and the blocks that cannot be read.

    Blocks that cannot be read also stay in the surrounding text.  Never raises.
    """
    return read_blocks(text, lambda _, at: _read_block(text, at))


def read_blocks(text: str, read_block: ReadBlock) -> ReadCalls:
    """The same for any format whose calls are blocks of ``<tool_call>`` … ``</tool_call>``.

    :param read_block: is given ``text`` and the index behind an opening tag.
    """
    if OPEN not in text:
        return text, [], []
    outside: list[str] = []
    calls: list[ToolCall] = []
    broken: list[str] = []
    kept, at = 0, text.find(OPEN)
    while at != -1:
        if found := read_block(text, at + len(OPEN)):
            call, end = found
            calls.append(call)
            outside.append(text[kept:at])
            kept = end
        else:
            close = text.find(CLOSE, at)
            end = len(text) if close == -1 else close + len(CLOSE)
            broken.append(text[at:end])
        at = text.find(OPEN, end)
    outside.append(text[kept:])
    if not calls:
        return text, [], broken
    return "\n".join(piece for part in outside if (piece := part.strip())), calls, broken


def _read_block(text: str, at: int) -> tuple[ToolCall, int] | None:
    """The call whose JSON begins at ``at`` and the index behind its closing tag, or None."""
    members = members_at(text, at)
    if members is None:
        return None
    slices, end = members
    end = skip_space(text, end)
    if not text.startswith(CLOSE, end) or not {"name", "arguments"} <= slices.keys():
        return None
    name, arguments = json.loads(slices["name"]), slices["arguments"]
    if not isinstance(name, str) or not name or parse_arguments(arguments) is None:
        return None
    return ToolCall(name, arguments), end + len(CLOSE)


def members_at(text: str, at: int) -> tuple[dict[str, str], int] | None:
    """The raw text of each member of the JSON object at ``at``, and the index behind the object."""
    slices: dict[str, str] = {}
    at = skip_space(text, at)
    if not text.startswith("{", at):
        return None
    at = skip_space(text, at + 1)
    try:
        while text.startswith('"', at):
            key, at = _DECODER.raw_decode(text, at)
            at = skip_space(text, at)
            if not text.startswith(":", at):
                return None
            start = skip_space(text, at + 1)
            _, at = _DECODER.raw_decode(text, start)
            slices[key] = text[start:at]
            at = skip_space(text, at)
            if text.startswith("}", at):
                return slices, at + 1
            if not text.startswith(",", at):
                return None
            at = skip_space(text, at + 1)
    except (ValueError, RecursionError):
        return None
    return None


def object_at(text: str, at: int) -> int | None:
    """The index behind the JSON object that begins at ``at``, or None where none does."""
    try:
        _, end = _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None
    return end if parse_arguments(text[at:end]) is not None else None


def skip_space(text: str, at: int) -> int:
    """The index of the first character from ``at`` on that is no white space of JSON's."""
    match = _SPACE.match(text, at)
    return match.end() if match else at
