"""A reply of the model, read: reasoning, text, tool calls.

How a family writes them is in `astuner.chat.families`.

Invariant: reading never fails and never guesses; what cannot be read stays in the text.
"""

from __future__ import annotations

from typing import Any

from astuner.contracts.chat_family import CallStyle, Read, Tools

THINK, END_THINK = "<think>", "</think>"


def split_reasoning(text: str, *, thinking: bool) -> tuple[str, str]:
    """Split a reply into (reasoning, the rest), as Qwen3's template joins them.

    :param thinking: the prompt has already opened the thought.
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


def opens_thought(prompt: str) -> bool:
    """Whether ``prompt`` ends in a thought just opened, which the reply goes on with."""
    _, opened, thought = prompt.rpartition(THINK)
    return bool(opened) and not thought.strip()


def read_tagged(text: str, style: CallStyle, tools: Tools, *, reasoning: bool, thinking: bool) -> Read:
    """Take a reply apart whose thought, if it has one, stands between ``<think>`` tags in front.

    :param tools: the tools whose calls are to be read; none: calls stay text.
    :param reasoning: whether the family marks its reasoning.
    :param thinking: the prompt has already opened the thought.
    """
    thought, content = split_reasoning(text, thinking=thinking) if reasoning else ("", text)
    if not tools:
        return Read(thought, content, [], [])
    return Read(thought, *style.read(content, tools))


def assistant_message(reply: Read, *, id_prefix: str) -> dict[str, Any]:
    """``reply`` as an OpenAI-style assistant message.

    ``content`` is always a string.  ``reasoning_content``, ``tool_calls`` and ``unparsed_tool_calls`` (raw texts,
    not part of OpenAI's message) are there only when they are not empty.

    :param id_prefix: tool-call ids are this, a number and, where the model gave the call an id, that.
    """
    message: dict[str, Any] = {"role": "assistant", "content": reply.content}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["tool_calls"] = [
            {
                "id": f"{id_prefix}{n}" + (f"_{call.id}" if call.id else ""),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for n, call in enumerate(reply.calls)
        ]
    if reply.broken:
        message["unparsed_tool_calls"] = reply.broken
    return message
