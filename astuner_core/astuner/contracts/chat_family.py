"""How a model family writes: where a turn ends, how a tool is called.

A family is data (`Family`) and a few small readers, which a plugin registers by ``register_chat_families``.  Which one
a chat template belongs to is found out by rendering with it (`astuner.chat.template`), never by the model's name.

Invariant, for readers: reading never fails and never guesses.  What is not exactly a call stays in the text and is
listed, so that a check can see it; the arguments of a good call are the model's own characters, where its format has
JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from astuner.contracts.messages import Message, parse_arguments

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
ReadReply: TypeAlias = Callable[[str, Tools], "Read"]


@dataclass(frozen=True)
class Read:
    """A reply, taken apart."""

    reasoning: str
    content: str
    calls: list[ToolCall]
    broken: list[str]
    """Blocks that look like calls and cannot be read; they are part of `content` as well.

    If nothing follows the reasoning, also the calls inside it; they are part of `reasoning`.
    """


@dataclass(frozen=True)
class CallStyle:
    """One way to write tool calls."""

    name: str
    read: Callable[[str, Tools], ReadCalls]
    """Given a reply without its reasoning, and the tools that may be called."""
    one_call: bool = False
    """Whether a reply holds at most one call."""
    reshape: Callable[[Sequence[Message]], Sequence[Message]] | None = None
    """Puts messages (normalised) in the form that the chat template takes, such as one call in each; None: as they are.

    What a message says is not changed; what the template has no place for may be left out.
    """

    @classmethod
    def of_replies(cls, name: str, read: ReadReply, **more: Any) -> CallStyle:
        """The style of a family that reads whole replies.

        :param more: the fields of a style.
        """

        def calls(text: str, tools: Tools) -> ReadCalls:
            found = read(text, tools)
            return found.content, found.calls, found.broken

        return cls(name, calls, **more)


@dataclass(frozen=True)
class Family:
    """The conventions of a model family."""

    name: str
    asks: str
    """What the generation prompt begins with; empty where the template writes none."""
    closes: tuple[str, ...] = ()
    """Tokens that close a turn. One of them stands behind a reply in history; they mean the same there."""
    follows: tuple[str, ...] = ()
    """Where nothing closes a turn: the tokens that what follows begins with."""
    stops: tuple[str, ...] = ()
    """Tokens at which the model's turn is over; those that the tokenizer does not have are left out."""
    asked: str = ""
    """What the text in front of a reply ends with, where there is no generation prompt."""
    styles: tuple[CallStyle, ...] = ()
    """Ways to write calls that are tried on what the template renders; none: calls are not supported."""
    channels: ReadReply | None = None
    """Reads whole replies, in families that write reasoning, text and calls as messages of their own."""


def tool_names(tools: Tools) -> tuple[str, ...]:
    """Return the names of ``tools``; a description without a name has none."""
    functions = [tool.get("function", tool) for tool in tools if isinstance(tool, (dict, Mapping))]
    names = [function.get("name") for function in functions if isinstance(function, (dict, Mapping))]
    return tuple(name for name in names if isinstance(name, str))


def read_blocks(text: str, read_block: ReadBlock) -> ReadCalls:
    """Split ``text`` into what surrounds its calls, the calls, and the blocks that cannot be read.

    For formats whose calls are blocks of ``<tool_call>`` … ``</tool_call>``.  Blocks that cannot be read also stay in
    the surrounding text.  Never raises unless ``read_block`` does.

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


def read_hermes(text: str, tools: Tools = ()) -> ReadCalls:
    """What surrounds the Hermes calls of a reply, the calls, and the blocks that cannot be read.

    A Hermes call (Qwen2.5, Qwen3) is ``<tool_call>`` + a JSON object with ``name`` and ``arguments`` + ``</tool_call>``
    (https://github.com/NousResearch/Hermes-Function-Calling).
    """
    return read_blocks(text, _hermes_call)


def _hermes_call(text: str, at: int) -> tuple[ToolCall, int] | None:
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


HERMES = CallStyle("Hermes tool calls", read_hermes)
