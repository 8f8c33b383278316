"""How a model family writes its replies: reasoning, text, tool calls.

Adding a family means adding a `ReplyFormat` to `FORMATS`: how its turns end, and a function that reads a reply.
Which one a chat template belongs to is found out by rendering with it, never by the model's name.

Invariant: reading never fails and never guesses; what cannot be read stays in the text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from astuner.chat.tool_calls import ToolCall, read_tool_calls

THINK, END_THINK = "<think>", "</think>"


@dataclass(frozen=True)
class ReplyFormat:
    """The text conventions of a model family."""

    name: str
    end_of_turn: str
    """The one token that ends a turn."""
    prompt_start: str
    """What the generation prompt begins with."""
    read_tool_calls: Callable[[str], tuple[str, list[ToolCall], list[str]]]
    """Splits a text into what surrounds the calls, the calls, and the blocks that cannot be read."""


FORMATS = (ReplyFormat("ChatML with Hermes tool calls", "<|im_end|>", "<|im_start|>assistant", read_tool_calls),)


def split_reasoning(text: str, *, thinking: bool) -> tuple[str, str]:
    """Split a reply into (reasoning, the rest), as Qwen3's template joins them.

    :param thinking: the generation prompt has already opened the thought.
    """
    lead, opened, inside = text.partition(THINK)
    if opened and not lead.strip():
        pass  # the reply opens its thought itself
    elif thinking:
        inside = text
    else:
        return "", text
    thought, closed, rest = inside.partition(END_THINK)
    return thought.strip("\n"), rest.lstrip("\n") if closed else ""


def assistant_message(
    text: str, reply_format: ReplyFormat, *, id_prefix: str, tools: bool, reasoning: bool, thinking: bool
) -> dict[str, Any]:
    """The OpenAI-style assistant message that ``text`` (without its end token) stands for.

    ``content`` is always a string.  ``reasoning_content``, ``tool_calls`` and ``unparsed_tool_calls`` (raw texts,
    not part of OpenAI's message) are there only when they are not empty.

    :param id_prefix: tool-call ids are this and a number.
    :param tools: whether tool calls are to be read.
    :param reasoning: whether the family marks its reasoning.
    """
    thought, content = split_reasoning(text, thinking=thinking) if reasoning else ("", text)
    calls: list[ToolCall] = []
    broken: list[str] = []
    if tools:
        content, calls, broken = reply_format.read_tool_calls(content)
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = [
            {
                "id": f"{id_prefix}{n}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for n, call in enumerate(calls)
        ]
    if broken:
        message["unparsed_tool_calls"] = broken
    return message
