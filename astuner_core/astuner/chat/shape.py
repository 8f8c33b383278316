"""Messages in the form that one chat template takes.

Invariant: what a message says is not changed; where a template has no place for something, it is left out here as
the template itself would leave it out, and never silently put elsewhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from astuner.contracts.messages import Message, parse_arguments

SHORT = 9
"""Characters of an id in the templates that want short ones."""


@dataclass(frozen=True)
class Shape:
    """What a chat template wants of messages."""

    text_arguments: bool = False
    """Arguments as JSON text, for templates that put them between strings; else as the object."""
    short_ids: bool = False
    """Tool-call ids of nine letters or digits."""
    one_call: bool = False
    """One call in each assistant message."""
    one_text: bool = False
    """Beside a call, either content or reasoning."""


def shaped(messages: Sequence[Message], shape: Shape) -> list[Message]:
    """``messages`` (normalised), as a template of this shape takes them."""
    if shape.one_call:
        messages = list(_one_call_each(messages))
    return [_shaped(message, shape) for message in messages]


def short_id(label: str | None) -> str:
    """The id of nine letters or digits that stands for ``label``: the one the model gave the call, if it gave one."""
    text = label or ""
    own = text.rpartition("_")[2]
    if len(own) == SHORT and own.isalnum():
        return own
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:SHORT]


def _shaped(message: Message, shape: Shape) -> Message:
    out = dict(message)
    if shape.short_ids and message["role"] == "tool":
        out["tool_call_id"] = short_id(message.get("tool_call_id"))
    if calls := message.get("tool_calls"):
        out["tool_calls"] = [_shaped_call(call, shape) for call in calls]
        if shape.one_text and message["content"]:
            out.pop("reasoning_content", None)
    return out


def _shaped_call(call: Any, shape: Shape) -> dict[str, Any]:
    function = call["function"]
    arguments: Any = function["arguments"]
    if not shape.text_arguments:  # such templates write ``arguments | tojson``; text that is no object stays as it is
        parsed = parse_arguments(arguments)
        arguments = arguments if parsed is None else parsed
    label = short_id(call.get("id")) if shape.short_ids else call.get("id")
    return {**call, "id": label, "function": {**function, "arguments": arguments}}


def _one_call_each(messages: Sequence[Message]) -> Iterator[Message]:
    """Parallel calls as the model would have made them one after another: each followed by its own result."""
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            yield message
            continue
        results: list[Message] = []
        while at < len(messages) and messages[at]["role"] == "tool":
            results.append(messages[at])
            at += 1
        ids = [call.get("id") for call in calls]
        for n, call in enumerate(calls):
            yield {**message, "content": message["content"] if n == 0 else "", "tool_calls": [call]}
            own = [r for r in results if r.get("tool_call_id") == ids[n]]
            own = own[:1] if ids[n] in ids[n + 1 :] else own  # calls that share an id, or have none: in order
            yield from own
            results = [r for r in results if not any(r is taken for taken in own)]
        yield from results
