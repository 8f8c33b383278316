"""Messages and tools in OpenAI's chat form, checked and copied, so that what comes behind meets no surprises.

Invariant: what is returned is made of the fields that the chat codec reads and of nothing else; a field with anything
else to say is refused by its path.
"""

from __future__ import annotations

import json
from typing import Any

from astuner_gateway.endpoint import fields
from astuner_gateway.endpoint.errors import refused
from astuner_gateway.endpoint.fields import HONOURED, LABEL, Table, never, only
from astuner_gateway.endpoint.request import said_in

ROLES = ("system", "developer", "user", "assistant", "tool")

_MESSAGE: Table = {
    "role": HONOURED,
    "content": HONOURED,
    "name": HONOURED,
    "tool_calls": HONOURED,
    "tool_call_id": HONOURED,
    "reasoning_content": HONOURED,
    "reasoning": HONOURED,  # newer servers' word for reasoning_content
    "refusal": HONOURED,
    "annotations": only([], why="cites sources, which no model here does"),
    "audio": never("is sound, and the model reads text only"),
    "function_call": never("OpenAI replaced by tool_calls"),
    "cache_control": LABEL,
    "parsed": LABEL,  # what client libraries add to an answer that they hand back as history
    "unparsed_tool_calls": LABEL,  # ours; the text holds them too
}
_CALL: Table = {"id": HONOURED, "type": HONOURED, "function": HONOURED, "index": LABEL}
_CALLED: Table = {"name": HONOURED, "arguments": HONOURED, "parsed_arguments": LABEL}
_PART: Table = {
    "type": HONOURED,
    "text": HONOURED,
    "cache_control": LABEL,
    "prompt_cache_breakpoint": LABEL,
    "annotations": only([], why="cites sources, which no model here does"),
}
_TOOL: Table = {"type": HONOURED, "function": HONOURED, "cache_control": LABEL}
_FUNCTION: Table = {
    "name": HONOURED,
    "description": HONOURED,
    "parameters": HONOURED,
    # Sampling is never constrained; a call that does not fit the parameters is for the agent to see, strict or not.
    "strict": LABEL,
}

TEXT_ONLY = "; the model reads text only, so send parts of type 'text'"


def read_messages(value: Any, path: str = "messages") -> list[dict[str, Any]]:
    """The conversation in a chat completion's ``messages``.

    :raises ApiError: 400 with the path of what cannot be read.
    """
    messages = [_message(message, f"{path}[{i}]") for i, message in enumerate(fields.items(value, path))]
    if not messages:
        raise refused(path, "is empty; there must be at least one message")
    return messages


def _message(value: Any, path: str) -> dict[str, Any]:
    given = fields.mapping(value, path)
    fields.check(given, _MESSAGE, f"{path}.")
    role = fields.one_of(given.get("role"), f"{path}.role", ROLES)
    calls = [
        _call(call, f"{path}.tool_calls[{i}]")
        for i, call in enumerate(fields.optional_items(given.get("tool_calls"), f"{path}.tool_calls"))
    ]
    refusal = fields.optional_text(given.get("refusal"), f"{path}.refusal")
    thoughts = [
        fields.optional_text(given.get(field), f"{path}.{field}") for field in ("reasoning_content", "reasoning")
    ]
    is_reply = role == "assistant"
    if calls and not is_reply:
        raise refused(f"{path}.tool_calls", f"are in a message of the role {role!r}; only the assistant calls tools")
    says_otherwise = is_reply and bool(calls or refusal or any(thoughts))
    message: dict[str, Any] = {"role": role, "content": _content(given, path, is_reply, says_otherwise)}
    if (name := fields.optional_text(given.get("name"), f"{path}.name")) is not None:
        message["name"] = name
    if role == "tool":
        message["tool_call_id"] = fields.text(given.get("tool_call_id"), f"{path}.tool_call_id")
    if not is_reply:
        return message
    if refusal and not message["content"]:
        message["content"] = said_in(refusal)
    for thought in filter(None, thoughts):
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = calls
    return message


def _content(given: dict[str, Any], path: str, is_reply: bool, says_otherwise: bool) -> Any:
    """A message's content: text, or parts that are text; None for a reply that says what it says in other fields.

    A model or a tool may say nothing, and frameworks send that again as null or an empty list.
    """
    value = given.get("content")
    if given["role"] in ("assistant", "tool") and (value is None or value == []):
        return None if says_otherwise else ""
    path = f"{path}.content"
    said = fields.text_or_parts(value, path)
    return said if isinstance(said, str) else [_part(part, f"{path}[{i}]", is_reply) for i, part in enumerate(said)]


def _part(value: Any, path: str, is_reply: bool) -> dict[str, Any]:
    part = fields.mapping(value, path)
    kind = part.get("type", "text")
    if kind == "refusal":
        return {"type": "text", "text": said_in(fields.text(part.get("refusal"), f"{path}.refusal"))}
    if kind != "text":
        raise refused(f"{path}.type", f"is {fields.shown(kind)}{TEXT_ONLY}")
    fields.check(part, _PART, f"{path}.")
    if is_reply and "text" in part and part["text"] is None:  # AgentScope 1.0.7, where a message is a tool call only
        return {"type": "text", "text": ""}
    return {"type": "text", "text": fields.text(part.get("text"), f"{path}.text")}


def _call(value: Any, path: str) -> dict[str, Any]:
    call = fields.mapping(value, path)
    if call.get("type") not in (None, "function"):
        raise refused(f"{path}.type", f"is {fields.shown(call['type'])}; only tools of type 'function' are known")
    fields.check(call, _CALL, f"{path}.")
    function = fields.mapping(call.get("function"), f"{path}.function")
    fields.check(function, _CALLED, f"{path}.function.")
    return called(call.get("id"), function.get("name"), function.get("arguments"), f"{path}.id", f"{path}.function.")


def called(call_id: Any, name: Any, arguments: Any, id_path: str, path: str) -> dict[str, Any]:
    """A tool call in OpenAI's form."""
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {
        "id": fields.text(call_id, id_path),
        "type": "function",
        "function": {"name": fields.word(name, f"{path}name"), "arguments": fields.text(arguments, f"{path}arguments")},
    }


def read_tools(value: Any, path: str = "tools") -> list[dict[str, Any]]:
    """The tools of a chat completion.

    :raises ApiError: 400 with the path of what cannot be read.
    """
    tools = []
    for i, given in enumerate(fields.items(value, path)):
        tool = fields.mapping(given, f"{path}[{i}]")
        if tool.get("type", "function") != "function":
            raise refused(
                f"{path}[{i}].type", f"is {fields.shown(tool['type'])}; only tools of type 'function' are known"
            )
        fields.check(tool, _TOOL, f"{path}[{i}].")
        function = fields.mapping(tool.get("function"), f"{path}[{i}].function")
        fields.check(function, _FUNCTION, f"{path}[{i}].function.")
        tools.append(function_tool(function, f"{path}[{i}].function."))
    return tools


def function_tool(function: dict[str, Any], path: str, parameters: str = "parameters") -> dict[str, Any]:
    """A tool as the model is shown it: the same for the same tool, whichever API it comes by.

    :param parameters: where the JSON schema of its arguments is.
    """
    shown_to_model: dict[str, Any] = {"name": fields.word(function.get("name"), f"{path}name")}
    if (description := fields.optional_text(function.get("description"), f"{path}description")) is not None:
        shown_to_model["description"] = description
    if function.get(parameters) is not None:
        shown_to_model["parameters"] = fields.mapping(function[parameters], f"{path}{parameters}")
    return {"type": "function", "function": shown_to_model}


def named_tool(name: Any, path: str) -> dict[str, Any]:
    """A ``tool_choice`` that names one tool, in the words of chat completions."""
    return {"type": "function", "function": {"name": fields.word(name, path)}}
