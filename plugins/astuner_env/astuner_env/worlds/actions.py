"""What a model said: text and tool calls, read out of an assistant message in which anything may be."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def text_of(action: Mapping[str, Any]) -> str:
    """The message's text; of a list of parts, the text parts."""
    content = action.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        return ""
    parts = [part.get("text") for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
    return "\n".join(text for text in parts if isinstance(text, str))


def calls_of(action: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The message's tool calls as (name, arguments); arguments that cannot be read are none."""
    given = action.get("tool_calls")
    if not isinstance(given, Sequence) or isinstance(given, str):
        return []
    return [_call(call) for call in given]


def _call(call: Any) -> tuple[str, dict[str, Any]]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return "", {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):  # nested a thousand deep
            arguments = None
    return str(function.get("name", "")), dict(arguments) if isinstance(arguments, Mapping) else {}


def tool(name: str, description: str, argument: str, meaning: Mapping[str, Any]) -> dict[str, Any]:
    """An OpenAI-style description of a tool with one argument.

    :param meaning: the argument's JSON schema.
    """
    parameters = {"type": "object", "properties": {argument: dict(meaning)}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}
