"""From the ways in which traces write messages down to OpenAI's.

Three are known: OpenTelemetry's (a role and parts), AgentScope's (a role and blocks) and OpenAI's own.  Kept are text,
tool calls and tool results; a thought is left out, since it is the other model's and no part of what was said; what is
no text (images, files) is named in brackets.  Invariant: what comes out is a list of valid OpenAI messages with text
contents.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from astuner_flywheel.traces.spans import decoded

Message = dict[str, Any]

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_THOUGHTS = {"reasoning", "thinking", "redacted_thinking"}
_TEXTS = {"text", "input_text", "output_text", "refusal"}
_CALLS = {"tool_call", "tool_use"}
_RESULTS = {"tool_call_response", "tool_result"}


class Unreadable(ValueError):
    """Not messages; says what is wrong, the reader adds where."""


def read_messages(value: Any) -> list[Message]:
    """Messages in any of the three ways, also as JSON text.

    :raises Unreadable: they are none.
    """
    value = decoded(value)
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, (list, tuple)):
        raise Unreadable(f"messages are {_kind(value)}, not a list")
    found: list[Message] = []
    for message in value:
        found.extend(_read(message))
    return found


def system_message(instructions: Any) -> list[Message]:
    """``gen_ai.system_instructions`` (parts, or text) as a system message; none where there is no text."""
    value = decoded(instructions)
    text = value if isinstance(value, str) else shown(value)
    return [{"role": "system", "content": text}] if text.strip() else []


def shown(content: Any) -> str:
    """A content as text; parts that are no text are named, thoughts left out."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        return json.dumps(content, ensure_ascii=False, default=str)
    return "\n".join(text for part in content if (text := _shown_part(part)) is not None)


def text_of(message: Mapping[str, Any]) -> str:
    return str(message.get("content") or "")


def _read(message: Any) -> list[Message]:
    if not isinstance(message, Mapping):
        raise Unreadable(f"a message is {_kind(message)}, not an object")
    role = _ROLES.get(str(message.get("role")))
    if role is None:
        raise Unreadable(f"a message has the role {str(message.get('role'))[:40]!r}")
    parts = message["parts"] if "parts" in message else message.get("content")
    if role == "tool" and "tool_call_id" in message:
        return [_result(message["tool_call_id"], parts, message.get("name"))]
    if not isinstance(parts, (list, tuple)):
        parts = [parts] if parts is not None else []
    calls = message.get("tool_calls") or ()
    if not isinstance(calls, (list, tuple)):
        raise Unreadable(f"tool_calls are {_kind(calls)}, not a list")
    return _assembled(role, [*parts, *map(_as_part, calls)])


def _assembled(role: str, parts: Sequence[Any]) -> list[Message]:
    """The messages of one: an agent may put its calls, their results and more text into one message."""
    found: list[Message] = []
    texts: list[str] = []
    calls: list[Message] = []

    def flush() -> None:
        if texts or calls:
            content = "\n".join(texts)
            # Whatever role framework code gave it: who calls tools is the assistant.
            of = "assistant" if calls else role
            found.append({"role": of, "content": content, **({"tool_calls": list(calls)} if calls else {})})
            texts.clear()
            calls.clear()

    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in _CALLS:
            calls.append(_call(part))
        elif kind in _RESULTS:
            flush()
            content = next((part[k] for k in ("response", "result", "output", "content") if k in part), "")
            found.append(_result(part.get("id") or part.get("tool_use_id"), content, part.get("name")))
        elif (text := _shown_part(part)) is not None:
            if calls:
                flush()
            texts.append(text)
    flush()
    return found


def _as_part(call: Any) -> Message:
    """A call as OpenAI writes it, as a part."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise Unreadable("a tool call has no function")
    return {
        "type": "tool_call",
        "id": call.get("id"),
        "name": function.get("name"),
        "arguments": function.get("arguments"),
    }


def _call(part: Mapping[str, Any]) -> Message:
    arguments: Any = next((part[k] for k in ("arguments", "input") if part.get(k) is not None), {})
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False, default=str)
    function = {"name": str(part.get("name") or ""), "arguments": arguments}
    return {"id": str(part.get("id") or ""), "type": "function", "function": function}


def _result(of: Any, content: Any, name: Any) -> Message:
    parts = decoded(content)
    is_parts = isinstance(parts, list) and parts and all(isinstance(p, Mapping) and "type" in p for p in parts)
    text = shown(parts) if is_parts else shown(content)
    return {"role": "tool", "tool_call_id": str(of or ""), "content": text, **({"name": str(name)} if name else {})}


def _shown_part(part: Any) -> str | None:
    """A part as text; None where it says nothing."""
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        return None if part is None else str(part)
    kind = part.get("type")
    if kind in _THOUGHTS:
        return None
    text = next((part[k] for k in ("text", "content", "refusal") if isinstance(part.get(k), str)), None)
    if kind in _TEXTS or (kind is None and text is not None):
        return text
    return f"[{kind or 'part'}]"


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null", int: "a number"}
    return names.get(type(value), f"a {type(value).__name__}")
