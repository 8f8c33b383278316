"""Parse a reply of the model: reasoning, text and tool calls, in the format of its family.

Families are ChatML with Hermes calls, families registered by plugins, and the tokenizer's ``response_template``. The
latter is used by transformers for unknown families. It returns arguments as objects, which are written as JSON here, so
they are not the model's own spelling. A reply that it cannot parse is text.

A structured answer is a call of an additional tool, whose arguments are the answer. Sampling is never constrained to
the structure: the log-probabilities would no longer be the policy's.

An answer ends before the caller's stop strings. Engines that receive them (`SamplingParams.stop`) stop there as far as
they can; the rest is cut here. A prefix of a sampled answer is itself a sample, so cutting the tokens after the first
one that completes a stop string gives the same result as stopping there.

Invariant: parsing never fails and never guesses; text that cannot be parsed stays text.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from astuner.contracts.chat_family import HERMES, CallStyle, Family, Read, ToolCall, Tools
from astuner.contracts.errors import PluginError
from astuner.contracts.types import FinishReason, Generation
from astuner.plugins import registry
from astuner.plugins.loader import PluginManager, load_plugins

THINK, END_THINK = "<think>", "</think>"


def split_reasoning(text: str, *, thinking: bool) -> tuple[str, str]:
    """Split a reply into (reasoning, rest), as Qwen3's template joins them.

    :param thinking: Whether the prompt has already opened the thought.
    """
    lead, opened, inside = text.partition(THINK)
    if opened and not lead.strip():
        pass  # the reply opens its thought
    elif thinking:
        inside = text
    else:
        return "", text
    thought, closed, rest = inside.partition(END_THINK)
    return thought.strip("\n"), rest.lstrip("\n") if closed else ""


def opens_thought(prompt: str) -> bool:
    """Return whether ``prompt`` ends with a newly opened thought, which the reply continues."""
    _, opened, thought = prompt.rpartition(THINK)
    return bool(opened) and not thought.strip()


def read_tagged(text: str, style: CallStyle, tools: Tools, *, reasoning: bool, thinking: bool) -> Read:
    """Parse a reply whose thought, if it has one, is between ``<think>`` tags at the start.

    :param tools: Tools whose calls are parsed; without tools, calls stay text.
    :param reasoning: Whether the family marks its reasoning.
    :param thinking: Whether the prompt has already opened the thought.
    """
    thought, content = split_reasoning(text, thinking=thinking) if reasoning else ("", text)
    if not tools:
        return Read(thought, content, [], [])
    content, calls, broken = style.read(content, tools)
    if thought and not (calls or broken or content.strip()):
        broken = calls_in_thought(thought, style, tools)
    return Read(thought, content, calls, broken)


def calls_in_thought(thought: str, style: CallStyle, tools: Tools) -> list[str]:
    """Return the texts of calls inside a thought that no answer follows.

    The model may have called a tool without ending its thought, or only considered a call. These are therefore not
    calls but calls that cannot be parsed, visible to the agent, checks and metrics.
    """
    _, calls, broken = style.read(thought, tools)
    if not calls:
        return broken

    def cuts_a_call(start: int) -> bool:
        return len(style.read(thought[start:], tools)[1]) < len(calls)

    start = bisect_left(range(1, len(thought) + 1), True, key=cuts_a_call)
    return [thought[start:].strip()]


def assistant_message(reply: Read, *, id_prefix: str) -> dict[str, Any]:
    """Return a parsed reply as an OpenAI-style assistant message.

    ``content`` is always a string. ``reasoning_content``, ``tool_calls`` and ``unparsed_tool_calls`` (raw texts, not
    part of OpenAI's message) are present only if they are not empty.

    :param id_prefix: Prefix of tool-call IDs, followed by a number and the model's ID of the call, if there is one.
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


STRUCTURED_TOOL = "generate_structured_output"
"""Tool with which agents of AgentScope answer in a schema."""


def structured_tool(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tool that takes an answer of this JSON schema (of an object)."""
    return {
        "type": "function",
        "function": {
            "name": STRUCTURED_TOOL,
            "description": "Give the answer in the required structure.",
            "parameters": dict(schema),
        },
    }


NO_CALLS: CallStyle = CallStyle("no tool calls", lambda text, tools: (text, [], []))
CHATML = Family("ChatML", "<|im_start|>assistant", closes=("<|im_end|>",), stops=("<|im_end|>",), styles=(HERMES,))


def known_families(manager: PluginManager | None = None) -> tuple[Family, ...]:
    """Return the families of the core and of all active plugins, the core's first.

    :param manager: Plugins; None for the installed ones.
    :raises PluginError: A plugin registers an object that is not a family.
    """
    manager = manager or load_plugins()
    found = [CHATML]
    for plugin, name, provider in manager.offers("chat family"):
        family = registry.import_target(provider.target)
        if not isinstance(family, Family):
            raise PluginError(
                f"the chat family {name!r} of {plugin.dist} is {family!r}; it must be an "
                "astuner.contracts.chat_family.Family"
            )
        found.append(family)
    return tuple(found)


def can_parse(tokenizer: Any) -> bool:
    """Return whether the tokenizer has a response template and transformers is new enough to use it."""
    if not getattr(tokenizer, "response_template", None):
        return False
    try:
        from transformers.utils.chat_parsing import parse_response  # noqa: F401
    except ImportError:
        return False
    return True


def read_by_template(text: str, response_template: Any, *, prompt: str, tools: Tools) -> Read:
    """Parse a reply with the tokenizer's ``response_template``.

    :param prompt: End of the prompt, starting at the generation prompt.
    """
    read = _parsed(text, response_template, prompt=prompt, tools=tools)
    if read is None:
        return Read("", text, [], [text] if tools else [])
    if not tools:
        return Read("", text, [], []) if read.calls else read
    if read.reasoning and not (read.calls or read.content.strip()):
        before_thought = prompt.rpartition(THINK)[0] or prompt
        inside = _parsed(read.reasoning, response_template, prompt=before_thought, tools=tools)
        return replace(read, broken=[read.reasoning]) if inside and inside.calls else read
    return read


def _parsed(text: str, response_template: Any, *, prompt: str, tools: Tools) -> Read | None:
    """Return transformers' result for ``text``, or None if the text does not match the template."""
    from transformers.utils.chat_parsing import parse_response

    try:
        parsed = parse_response(text, response_template, prefix=prompt, tools=[dict(t) for t in tools] or None)
        calls = [_call(call) for call in parsed.get("tool_calls") or ()]
        content, thought = parsed.get("content") or "", parsed.get("reasoning_content") or ""
    except (ValueError, TypeError, KeyError):
        return None
    if not (isinstance(content, str) and isinstance(thought, str)):
        return Read("", text, [], [])
    return Read(thought, content, calls, [])


def _call(call: Any) -> ToolCall:
    function = call["function"]
    name, arguments = function["name"], function["arguments"]
    if not (isinstance(name, str) and name and isinstance(arguments, dict)):
        raise TypeError(f"a call of {name!r} with {type(arguments).__name__} arguments")
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False, allow_nan=False))


def cut_at_stop(
    generation: Generation, stops: Sequence[str], decode: Callable[[Sequence[int]], str]
) -> tuple[Generation, str | None]:
    """Return the generation up to the first stop string, and that string; (generation, None) without one.

    :param decode: Converts token IDs to text.
    """
    ids = generation.response_ids
    if not stops or not ids:
        return generation, None

    def holds_stop(n: int) -> bool:
        text = decode(ids[:n])
        return any(stop in text for stop in stops)

    if not holds_stop(len(ids)):
        return generation, None
    n = 1 + bisect_left(range(1, len(ids)), True, key=holds_stop)  # monotonic: more tokens contain more text
    text = decode(ids[:n])
    first = min((stop for stop in stops if stop in text), key=text.index)
    cut = replace(generation, response_ids=ids[:n], logprobs=generation.logprobs[:n], finish_reason=FinishReason.STOP)
    return cut, first
