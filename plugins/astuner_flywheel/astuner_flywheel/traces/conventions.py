"""Convert the conventions of tracing SDKs to the current GenAI convention of OpenTelemetry.

They differ in names, which ``tables.yaml`` lists, and in the form of messages: attributes with a number in the name
(``llm.input_messages.0.message.role``), JSON of a request and its reply, JSON of a function's arguments, text, and
events. Spans with current attributes keep them.

Invariants: a number in a name is used for sorting and never for allocation; messages are validated later by
`read_messages`; contents that cannot be converted are listed in `Span.unread`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from astuner_flywheel.traces.conversation import TABLES
from astuner_flywheel.traces.messages import (
    CHAT,
    INVOKE_AGENT,
    STEP,
    Message,
    Span,
    decoded,
    lookup,
    nested,
    system_message,
)

_NOTHING = dict.fromkeys(("kind", "marks", "input", "output", "model", "response"), ()) | {"session": ("session.id",)}
_CONVENTIONS: list[dict[str, Any]] = [{**_NOTHING, **each} for each in TABLES["conventions"]]
_ASKED, _SAID, _OPERATION = "gen_ai.input.messages", "gen_ai.output.messages", "gen_ai.operation.name"
_SIDES = (("input", _ASKED, "user"), ("output", _SAID, "assistant"))
_NAMES = (("model", "gen_ai.request.model"), ("response", "gen_ai.response.id"), ("session", "gen_ai.conversation.id"))
_WITHIN = {
    "user": ("messages", "input", "prompt", "contents"),
    "assistant": ("choices", "message", "output", "candidates", "text", "combined_chunk_content"),
}
"""Map the role of a plain text to the locations of messages in requests and replies."""
_OF_MESSAGES = {"role", "content", "parts", "tool_calls"}
_WRAPPED = ("message", "message_content", "tool_call")
"""Keys in which OpenInference wraps the items of its lists."""
_PARTS = {"text", "input_text", "output_text", "image", "image_url", "reasoning", "thinking", "tool_call", "tool_use"}
_EVENT = re.compile(r"gen_ai\.(system|user|assistant|tool)\.message|gen_ai\.choice")
_AT_ONCE = (("gen_ai.prompt", "gen_ai.completion"), (_ASKED, _SAID))
"""Attributes of events that contain all messages of a request and of a reply."""


def understood(span: Span) -> Span:
    """Return the span with current attribute names and its kind."""
    beside = decoded(span.get("events"))
    asked, said = of_events([*span.events, *(beside if isinstance(beside, list) else ())])
    if (asked or said) and span.get(_ASKED) is None:
        span = replace(span, attributes={**span.attributes, _ASKED: asked, _SAID: said})
    for convention in _CONVENTIONS:
        named = next(filter(None, map(span.text, convention["kind"])), "")
        if named or any(span.get(mark) is not None for mark in convention["marks"]):
            return _of(span, convention, named)
    known = f"{span.operation} span" if span.operation else f"span of an unknown convention (scope {span.scope[:60]!r})"
    return replace(span, kind=known)


def _of(span: Span, convention: Mapping[str, Any], named: str) -> Span:
    operation = span.operation or convention["operations"].get(named.lower(), "")
    found: dict[str, Any] = {_OPERATION: operation}
    unread: list[str] = []
    for side, today, role in _SIDES if operation in (CHAT, INVOKE_AGENT, STEP) else ():
        names = [name for name in convention[side] if span.get(today) is None and span.get(name) is not None]
        for name in names:
            if name.endswith("messages") and isinstance(decoded(span.get(name)), str):
                continue  # a list in Python syntax, as data frames write it to CSV
            if messages := messages_in(span.get(name), role, loose=operation != CHAT):
                found[today] = messages
                break
        else:
            unread += names
    for key, today in _NAMES:
        if not span.text(today) and (text := next(filter(None, map(span.text, convention[key])), "")):
            found[today] = text
    kind = f"{convention['name']} {named[:40] or operation or 'other'} span"
    return replace(span, kind=kind, attributes={**span.attributes, **found}, unread=tuple(unread))


def messages_in(value: Any, role: str, *, loose: bool) -> list[Message]:
    """Return possible messages in the input or output of a call, or an empty list.

    :param role: Role of a plain text.
    :param loose: Accept the only text among a function's arguments as a message.
    """
    value = decoded(value) if isinstance(value, str) else _plain(value)
    if isinstance(value, (str, int, float)):
        return [{"role": role, "content": str(value)}] if str(value).strip() else []
    if isinstance(value, list):
        return [m for item in value if isinstance(item, Mapping) for m in messages_in(item, role, loose=loose)]
    if not isinstance(value, Mapping):
        return []
    if str(value.get("type")).startswith("function_call"):
        return [_called(value)]
    if isinstance(value.get("content"), Mapping):
        return messages_in(value["content"], role, loose=loose)
    if _OF_MESSAGES & value.keys():
        return [_message(value, role)]
    for name in _WITHIN.get(role, ()):
        if value.get(name) is not None:
            told = value.get("instructions") or value.get("system")
            before = [{"role": "system", "content": told}] if isinstance(told, (str, list)) and role == "user" else []
            return [*before, *messages_in(value[name], role, loose=loose)]
    return _argument(value, role) if loose else []


def _argument(value: Mapping[str, Any], role: str) -> list[Message]:
    """Return the messages among a function's arguments, or else the only text."""
    args, kwargs = decoded(value.get("args")), decoded(value.get("kwargs"))
    given = [*(args if isinstance(args, list) else ()), *(kwargs.values() if isinstance(kwargs, Mapping) else ())]
    given = given or list(value.values())
    inner = (messages_in(item, role, loose=False) for item in given if isinstance(item, (list, Mapping)))
    if found := next(filter(None, inner), None):
        return found
    texts = [text for text in given if isinstance(text, str) and text.strip()]
    return [{"role": role, "content": texts[0]}] if len(texts) == 1 else []


def _message(value: Mapping[str, Any], role: str) -> Message:
    """Return a message in the form of `read_messages`: OpenAI tool calls, and tool results with the ID of the call."""
    kind = value.get("type")  # LangChain's name for the role
    found = {**value, "role": value.get("role") or (kind if kind in ("human", "ai", "system", "tool") else role)}
    if found.get("content") is None and "contents" in found:
        found["content"] = found["contents"]
    if _are_parts(parts := decoded(found.get("content"))):
        found["content"] = parts
    if found["role"] == "tool" and "parts" not in found:
        found.setdefault("tool_call_id", found.get("id"))
    calls = found.get("tool_calls")
    if isinstance(calls, list):
        found["tool_calls"] = [_as_openai(call) if isinstance(call, Mapping) else call for call in calls]
    return found


def _are_parts(value: Any) -> bool:
    """Return whether the value is a list of content parts and not JSON text written by a user."""
    parts = value if isinstance(value, list) else []
    return bool(parts) and all(isinstance(part, Mapping) and str(part.get("type")) in _PARTS for part in parts)


def _as_openai(call: Mapping[str, Any]) -> Mapping[str, Any]:
    return call if "function" in call else {"id": call.get("id"), "function": {"arguments": call.get("args"), **call}}


def _called(item: Mapping[str, Any]) -> Message:
    """Return a tool call or tool result in the form of OpenAI's Responses."""
    if "output" in item:
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": item["output"]}
    return {"role": "assistant", "tool_calls": [{"id": item.get("call_id"), "function": item}]}


def of_events(events: Iterable[Any]) -> tuple[list[Message], list[Message]]:
    """Return input and output messages from events of the last GenAI convention: of a span, of logs, or of a list."""
    asked: list[Message] = []
    said: list[Message] = []
    for event in events:
        if not isinstance(event, Mapping):
            continue
        beside = event.get("attributes")
        attributes = beside if isinstance(beside, Mapping) else event
        told = (event.get("body"), decoded(lookup(attributes, "gen_ai.event.content")), attributes)
        inside = next((value for value in told if isinstance(value, Mapping) and value), {})
        if match := _EVENT.fullmatch(str(event.get("event.name") or event.get("name"))):
            (asked if match[1] else said).extend(messages_in(inside, match[1] or "assistant", loose=True))
        asked += system_message(lookup(attributes, "gen_ai.system_instructions"))
        for before, after in _AT_ONCE:
            asked += messages_in(lookup(attributes, before), "user", loose=False)
            said += messages_in(lookup(attributes, after), "assistant", loose=False)
    return asked, said


def _plain(value: Any) -> Any:
    """Return attributes with numeric names as a list, without OpenInference's wrappers."""
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    if any("." in name for name in value):
        value = nested(value)
    if value and all(name.isascii() and name.isdecimal() and len(name) < 10 for name in value):
        return [_plain(value[name]) for name in sorted(value, key=int)]
    if len(value) == 1 and (only := next(iter(value))) in _WRAPPED:
        return _plain(value[only])
    return {name: _plain(item) for name, item in value.items()}
