"""Convert OpenAI-style messages to OpenTelemetry's format: a role and its parts, as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from astuner.contracts.messages import call_id, call_parts, mapping_of, parse_arguments, reasoning_of

LONGEST = 16_000
"""Maximum characters of a text. Longer texts are truncated with a note, because collectors reject large requests."""


def short(text: str) -> str:
    """Truncate ``text`` if it is too long."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}… [{len(text) - LONGEST:,} more characters]"


def shown(content: Any) -> str:
    """Return a message's content as text, with placeholders for parts that are not text."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, (list, tuple)):
        return str(content)
    parts = [mapping_of(part) for part in content]
    return "\n".join(_shown_part(part) for part in parts)


def _shown_part(part: Any) -> str:
    if not isinstance(part, Mapping):
        return str(part)
    return str(part["text"]) if part.get("text") is not None else f"[{part.get('type', 'part')}]"


def arguments_of(text: str) -> Any:
    """Return the arguments of a call as an object, or as text if they are not JSON."""
    return short(text) if len(text) > LONGEST or (found := parse_arguments(text)) is None else found


def as_json(value: Any) -> str:
    """Return ``value`` as JSON text."""
    return json.dumps(value, ensure_ascii=False, default=str)


def input_messages(messages: Iterable[Mapping[str, Any]]) -> str:
    """Return the value of `gen_ai.input.messages`."""
    return as_json([_message(mapping_of(message)) for message in messages])


def output_messages(reply: Mapping[str, Any], finish_reason: str) -> str:
    """Return the value of `gen_ai.output.messages`: the reply."""
    return as_json([{**_message({"role": "assistant", **reply}), "finish_reason": finish_reason}])


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    role, text = str(message.get("role") or "user"), short(shown(message.get("content")))
    if role == "tool":
        answer = {"type": "tool_call_response", "id": message.get("tool_call_id"), "response": text}
        return {"role": "tool", "parts": [answer]}
    parts: list[dict[str, Any]] = []
    if thought := reasoning_of(message):
        parts.append({"type": "reasoning", "content": short(thought)})
    if text:
        parts.append({"type": "text", "content": text})
    for call in message.get("tool_calls") or ():
        name, arguments = call_parts(call)
        parts.append({"type": "tool_call", "id": call_id(call), "name": name, "arguments": arguments_of(arguments)})
    named = {"name": message["name"]} if message.get("name") else {}
    return {"role": "system" if role == "developer" else role, "parts": parts, **named}
