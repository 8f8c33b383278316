"""Chat formats of model families: ends of turns, reasoning and tool calls.

A family consists of data (`Family`) and a few small readers; plugins register it with ``register_chat_families``. The
family of a chat template is determined by rendering messages with it (`astuner.chat.template`), never by the model's
name.

Invariant: readers never raise and never guess. Text that is not exactly a call stays in the content and is listed, so
that checks can report it. If the format uses JSON, the arguments of a valid call are the model's own characters.
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
    """A tool call as the model wrote it."""

    name: str
    arguments: str
    """A JSON object, exactly as written by the model."""
    id: str = ""
    """ID written by the model, in families whose models write one."""


Tools: TypeAlias = Sequence[Mapping[str, Any]]
"""OpenAI-style tool descriptions."""
ReadCalls: TypeAlias = tuple[str, list[ToolCall], list[str]]
"""The text around the calls, the calls, and the blocks that could not be parsed."""
ReadBlock: TypeAlias = Callable[[str, int], "tuple[ToolCall, int] | None"]
"""Parses the block that starts at an index. Returns the call and the index after its closing tag, or None."""
ReadReply: TypeAlias = Callable[[str, Tools], "Read"]


@dataclass(frozen=True)
class Read:
    """A parsed reply."""

    reasoning: str
    content: str
    calls: list[ToolCall]
    broken: list[str]
    """Blocks that look like calls but could not be parsed; they are also part of `content`.

    If the reply ends after the reasoning, this includes the calls inside it; they are also part of `reasoning`.
    """


@dataclass(frozen=True)
class CallStyle:
    """A format of tool calls."""

    name: str
    read: Callable[[str, Tools], ReadCalls]
    """Parses a reply without its reasoning, given the available tools."""
    one_call: bool = False
    """Whether a reply contains at most one call."""
    reshape: Callable[[Sequence[Message]], Sequence[Message]] | None = None
    """Converts normalized messages to the form that the chat template expects, e.g. one call per message.

    It keeps the contents of messages but may omit fields that the template does not support. None: no conversion.
    """

    @classmethod
    def of_replies(cls, name: str, read: ReadReply, **more: Any) -> CallStyle:
        """Return the style of a family that parses complete replies.

        :param more: Further fields of the style.
        """

        def calls(text: str, tools: Tools) -> ReadCalls:
            found = read(text, tools)
            return found.content, found.calls, found.broken

        return cls(name, calls, **more)


@dataclass(frozen=True)
class Family:
    """The chat conventions of a model family."""

    name: str
    asks: str
    """Start of the generation prompt; empty if the template has none."""
    closes: tuple[str, ...] = ()
    """Tokens that close a turn. In the history, one of them follows a reply; they are equivalent there."""
    follows: tuple[str, ...] = ()
    """If no token closes a turn: tokens that start the next message."""
    stops: tuple[str, ...] = ()
    """Tokens that end the model's turn. Tokens that the tokenizer lacks are ignored."""
    asked: str = ""
    """End of the text before a reply, if there is no generation prompt."""
    styles: tuple[CallStyle, ...] = ()
    """Call formats to try on the template's output. Empty: calls are not supported."""
    channels: ReadReply | None = None
    """Parses complete replies, for families that write reasoning, text and calls as separate messages."""


def tool_names(tools: Tools) -> tuple[str, ...]:
    """Return the names of ``tools``, skipping descriptions without a name."""
    functions = [tool.get("function", tool) for tool in tools if isinstance(tool, (dict, Mapping))]
    names = [function.get("name") for function in functions if isinstance(function, (dict, Mapping))]
    return tuple(name for name in names if isinstance(name, str))


def read_blocks(text: str, read_block: ReadBlock) -> ReadCalls:
    """Split ``text`` into the text around its calls, the calls, and the blocks that cannot be parsed.

    For formats with blocks of ``<tool_call>`` ... ``</tool_call>``. Blocks that cannot be parsed also stay in the
    surrounding text. Never raises unless ``read_block`` does.

    :param read_block: Receives ``text`` and the index after an opening tag.
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
    """Return the raw text of each member of the JSON object at ``at`` and the index after it, or None."""
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
    """Return the index after the JSON object that starts at ``at``, or None if there is no object."""
    try:
        _, end = _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None
    return end if parse_arguments(text[at:end]) is not None else None


def skip_space(text: str, at: int) -> int:
    """Return the index of the first character from ``at`` on that is not JSON white space."""
    match = _SPACE.match(text, at)
    return match.end() if match else at


def read_hermes(text: str, tools: Tools = ()) -> ReadCalls:
    """Return the text around the Hermes calls of a reply, the calls, and the blocks that cannot be parsed.

    A Hermes call (Qwen2.5, Qwen3) is ``<tool_call>`` + a JSON object with ``name`` and ``arguments`` + ``</tool_call>``
    (https://github.com/NousResearch/Hermes-Function-Calling).
    """
    return read_blocks(text, _hermes_call)


def _hermes_call(text: str, at: int) -> tuple[ToolCall, int] | None:
    """Return the call whose JSON starts at ``at`` and the index after its closing tag, or None."""
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
