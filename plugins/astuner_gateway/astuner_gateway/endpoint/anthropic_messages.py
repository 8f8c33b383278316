"""Anthropic's ``/v1/messages``: the request.

`tool_choice` and structures (``output_config.format``) are as in `astuner_gateway.endpoint.openai_chat`; a reply
without the structure that was asked for has no text and ``stop_reason: refusal``.  A last message of the assistant's
would ask to go on in the middle of a reply (prefill), which is refused: a turn of the model begins where its template
says.
"""

from __future__ import annotations

from typing import Any

from astuner_gateway.endpoint.anthropic_answer import body, error_events, events
from astuner_gateway.endpoint.errors import NO_THREADS, ApiError, refused
from astuner_gateway.endpoint.fields import (
    HONOURED,
    LABEL,
    Table,
    check,
    flag,
    items,
    mapping,
    never,
    one_of,
    only,
    optional_items,
    optional_mapping,
    optional_text,
    shown,
    text,
    text_or_parts,
    whole,
    word,
)
from astuner_gateway.endpoint.openai_chat import (
    DISTORTS,
    HOSTED,
    ONE_CALL,
    STATE,
    THINKING,
    given,
    read_model,
    read_sampling,
    read_stops,
)
from astuner_gateway.endpoint.openai_messages import TEXT_ONLY, called, function_tool, named_tool
from astuner_gateway.endpoint.request import ChatRequest, Dialect
from astuner_gateway.endpoint.structure import Structure

FIELDS: Table = {
    **{
        name: HONOURED
        for name in (
            "model",
            "messages",
            "system",
            "tools",
            "tool_choice",
            "max_tokens",
            "temperature",
            "top_p",
            "stop_sequences",
            "stream",
            "thinking",
            "output_config",
        )
    },
    **{name: LABEL for name in ("metadata", "service_tier", "cache_control", "inference_geo", "speed")},
    "top_k": only(-1, 0, why=DISTORTS),
    "container": never(HOSTED),
    "context_management": never("would rewrite the history, and so break the exact tokens"),
    "mcp_servers": only([], why=HOSTED),
    "compaction": never("would rewrite the history, and so break the exact tokens"),
    "diagnostics": LABEL,
    "thread": never(STATE),  # refused before this is asked, with a word that the client knows
    "prefill": never("would have a reply begin in its middle"),
}
_OUTPUT: Table = {"format": HONOURED, "effort": never(THINKING)}
_THINKING: Table = {"type": only("disabled", why=THINKING), "display": LABEL}
_CHOICE: Table = {"type": HONOURED, "name": HONOURED, "disable_parallel_tool_use": only(False, why=ONE_CALL)}
_TOOL: Table = {
    "type": HONOURED,
    "name": HONOURED,
    "description": HONOURED,
    "input_schema": HONOURED,
    "cache_control": LABEL,
    "strict": LABEL,  # see astuner_gateway.endpoint.openai_messages
    "eager_input_streaming": LABEL,  # how arguments are cut into deltas
    "defer_loading": only(False, why="is for Anthropic's tool search"),
    "input_examples": only([], why="have no place in a chat template; put them into the description"),
    "allowed_callers": only(["direct"], why="is for Anthropic's code execution"),
}
_MESSAGE: Table = {"role": HONOURED, "content": HONOURED}
_BLOCKS: dict[str, Table] = {
    "text": {"type": HONOURED, "text": HONOURED, "cache_control": LABEL, "parsed_output": LABEL}
    | {"citations": only([], why="are made by Anthropic's own servers")},
    "thinking": {"type": HONOURED, "thinking": HONOURED, "signature": LABEL},
    "tool_use": {"type": HONOURED, "id": HONOURED, "name": HONOURED, "input": HONOURED}
    | {"cache_control": LABEL, "caller": only({"type": "direct"}, why="is for Anthropic's code execution")},
    "tool_result": {"type": HONOURED, "tool_use_id": HONOURED, "content": HONOURED, "is_error": HONOURED}
    | {"cache_control": LABEL},
}
_IN_ROLE = {"user": ("text", "tool_result"), "assistant": ("text", "thinking", "tool_use"), "system": ("text",)}


def read(given_body: dict[str, Any], model: str) -> ChatRequest:
    """
    :raises ApiError: 400 with the path of what is not honoured.
    """
    if given_body.get("thread") is not None:
        raise refused("thread", STATE, code=NO_THREADS)
    check(given_body, FIELDS)
    check(optional_mapping(given_body.get("thinking"), "thinking"), _THINKING, "thinking.")
    tools = optional_items(given_body.get("tools"), "tools")
    messages = _messages(given_body.get("messages"))
    if system := _system(given_body.get("system")):
        messages.insert(0, {"role": "system", "content": system})
    return ChatRequest(
        model=read_model(given_body, model),
        messages=messages,
        tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)],
        sampling=given(
            max_tokens=whole(given_body.get("max_tokens"), "max_tokens", low=1),
            **read_sampling(given_body),
            stop=read_stops(given_body.get("stop_sequences"), "stop_sequences"),
            tool_choice=_tool_choice(given_body.get("tool_choice")),
        ),
        structure=_structure(optional_mapping(given_body.get("output_config"), "output_config")),
        stream=flag(given_body.get("stream"), "stream"),
    )


def _tool(value: Any, path: str) -> dict[str, Any]:
    tool = mapping(value, path)
    if tool.get("type") not in (None, "custom"):
        raise refused(f"{path}.type", f"is {shown(tool['type'])}, a tool of Anthropic's; define your own tools")
    check(tool, _TOOL, f"{path}.")
    return function_tool(tool, f"{path}.", parameters="input_schema")


def _tool_choice(value: Any) -> Any:
    if value is None:
        return None
    choice = mapping(value, "tool_choice")
    check(choice, _CHOICE, "tool_choice.")
    kind = one_of(choice.get("type"), "tool_choice.type", ("auto", "any", "tool", "none"))
    if kind == "tool":
        return named_tool(choice.get("name"), "tool_choice.name")
    return "required" if kind == "any" else kind


def _structure(wanted: dict[str, Any]) -> Structure | None:
    check(wanted, _OUTPUT, "output_config.")
    if wanted.get("format") is None:
        return None
    format_ = mapping(wanted["format"], "output_config.format")
    one_of(format_.get("type"), "output_config.format.type", ("json_schema",))
    return Structure.of(format_.get("schema"), "output_config.format.schema")


def _system(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return "\n".join(text(block["text"], "system") for block in _blocks(value, "system", "system"))


def _messages(value: Any) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    role = ""
    for i, given_message in enumerate(items(value, "messages")):
        path = f"messages[{i}]"
        message = mapping(given_message, path)
        check(message, _MESSAGE, f"{path}.")
        role = one_of(message.get("role"), f"{path}.role", tuple(_IN_ROLE))
        content = message.get("content")
        if role != "assistant" or content != []:  # our own answer has no blocks where the model said nothing
            content = text_or_parts(content, f"{path}.content")
        if isinstance(content, str):
            messages.append({"role": role, "content": content})
            continue
        blocks = _blocks(content, f"{path}.content", role)
        messages += [_assistant(blocks, path)] if role == "assistant" else _user(role, blocks, path)
    if not messages:
        raise refused("messages", "is empty; there must be at least one message")
    if role == "assistant":
        why = "is the assistant's; a reply cannot be begun for the model, so end with a message of the user"
        raise refused(f"messages[{len(value) - 1}].role", why)
    return messages


def _blocks(value: Any, path: str, role: str) -> list[dict[str, Any]]:
    blocks = [mapping(block, f"{path}[{i}]") for i, block in enumerate(items(value, path))]
    for i, block in enumerate(blocks):
        kind = block.get("type")
        if not isinstance(kind, str) or kind not in _IN_ROLE[role]:
            known = ", ".join(_IN_ROLE[role])
            why = f"is {shown(kind)}; a message of the role {role!r} may have blocks of type {known}{TEXT_ONLY}"
            raise refused(f"{path}[{i}].type", why.removesuffix(TEXT_ONLY))
        check(block, _BLOCKS[kind], f"{path}[{i}].")
        if kind == "text":
            text(block.get("text"), f"{path}[{i}].text")
    return blocks


def _joined(blocks: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    texts = [block["text"] for block in blocks]
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": said} for said in texts]


def _assistant(blocks: list[dict[str, Any]], path: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": None}
    if texts := [block for block in blocks if block["type"] == "text"]:
        message["content"] = _joined(texts)
    thoughts = [text(b.get("thinking"), f"{path}.content.thinking") for b in blocks if b["type"] == "thinking"]
    if thought := "".join(thoughts):
        message["reasoning_content"] = thought
    calls = [
        called(block.get("id"), block.get("name"), mapping(block.get("input"), f"{at}.input"), f"{at}.id", f"{at}.")
        for at, block in ((f"{path}.content[{i}]", block) for i, block in enumerate(blocks))
        if block["type"] == "tool_use"
    ]
    if calls:
        message["tool_calls"] = calls
    return message


def _user(role: str, blocks: list[dict[str, Any]], path: str) -> list[dict[str, Any]]:
    """Tool results are messages of their own, and neighbouring texts are one."""
    messages: list[dict[str, Any]] = []
    texts: list[dict[str, Any]] = []
    for i, block in enumerate([*blocks, None]):
        if block is not None and block["type"] == "text":
            texts.append(block)
            continue
        if texts:
            messages.append({"role": role, "content": _joined(texts)})
            texts = []
        if block is not None:
            messages.append(_result(block, f"{path}.content[{i}]"))
    return messages


def _result(block: dict[str, Any], path: str) -> dict[str, Any]:
    content = block.get("content")
    if isinstance(content, list):
        said: Any = _joined(_blocks(content, f"{path}.content", "system"))
    else:
        said = optional_text(content, f"{path}.content") or ""
    if flag(block.get("is_error"), f"{path}.is_error"):
        said = _as_error(said)
    return {"role": "tool", "tool_call_id": word(block.get("tool_use_id"), f"{path}.tool_use_id"), "content": said}


def _as_error(said: Any) -> Any:
    """A chat template has no place for ``is_error``, so the text says it."""
    first = said if isinstance(said, str) else (said[0]["text"] if said else "")
    if "error" in first[:40].lower():
        return said
    return f"Error: {first}" if isinstance(said, str) or not said else [{"type": "text", "text": "Error:"}, *said]


DIALECT = Dialect(
    route="/v1/messages",
    read=read,
    body=body,
    events=events,
    error=ApiError.anthropic,
    error_events=error_events,
)
