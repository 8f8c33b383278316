"""Anthropic's ``/v1/messages``: the request.

`tool_choice` and structures (``output_config.format``) are as in `astuner_gateway.endpoint.openai_chat`; a reply
without the structure that was asked for has no text and ``stop_reason: refusal``.  A last message of the assistant's
would ask to go on in the middle of a reply (prefill), which is refused: a turn of the model begins where its template
says.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from astuner.contracts.messages import parse_arguments
from astuner_gateway.endpoint import fields, openai_chat
from astuner_gateway.endpoint.errors import NO_THREADS, ApiError, refused
from astuner_gateway.endpoint.fields import HONOURED, LABEL, Table, never, only, same
from astuner_gateway.endpoint.openai_messages import TEXT_ONLY, called, function_tool, named_tool
from astuner_gateway.endpoint.request import Answer, ChatRequest, Dialect, Event, pieces
from astuner_gateway.endpoint.structure import Structure

FIELDS: Table = {
    **same(
        HONOURED,
        "model messages system tools tool_choice max_tokens temperature top_p stop_sequences stream "
        "thinking output_config",
    ),
    **{name: LABEL for name in ("metadata", "service_tier", "cache_control", "inference_geo", "speed")},
    "top_k": only(-1, 0, why=openai_chat.DISTORTS),
    "container": never(openai_chat.HOSTED),
    "context_management": never("would rewrite the history, and so break the exact tokens"),
    "mcp_servers": only([], why=openai_chat.HOSTED),
    "compaction": never("would rewrite the history, and so break the exact tokens"),
    "diagnostics": LABEL,
    "thread": never(openai_chat.STATE),  # refused before this is asked, with a word that the client knows
    "prefill": never("would have a reply begin in its middle"),
}
_OUTPUT: Table = {"format": HONOURED, "effort": never(openai_chat.THINKING)}
_THINKING: Table = {"type": only("disabled", why=openai_chat.THINKING), "display": LABEL}
_CHOICE: Table = {
    "type": HONOURED,
    "name": HONOURED,
    "disable_parallel_tool_use": only(False, why=openai_chat.ONE_CALL),
}
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
        raise refused("thread", openai_chat.STATE, code=NO_THREADS)
    fields.check(given_body, FIELDS)
    fields.check(fields.optional_mapping(given_body.get("thinking"), "thinking"), _THINKING, "thinking.")
    tools = fields.optional_items(given_body.get("tools"), "tools")
    messages = _messages(given_body.get("messages"))
    if system := _system(given_body.get("system")):
        messages.insert(0, {"role": "system", "content": system})
    return ChatRequest(
        model=openai_chat.read_model(given_body, model),
        messages=messages,
        tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)],
        sampling=openai_chat.given(
            max_tokens=fields.whole(given_body.get("max_tokens"), "max_tokens", low=1),
            **openai_chat.read_sampling(given_body),
            stop=openai_chat.read_stops(given_body.get("stop_sequences"), "stop_sequences"),
            tool_choice=_tool_choice(given_body.get("tool_choice")),
        ),
        structure=_structure(fields.optional_mapping(given_body.get("output_config"), "output_config")),
        stream=fields.flag(given_body.get("stream"), "stream"),
    )


def _tool(value: Any, path: str) -> dict[str, Any]:
    tool = fields.mapping(value, path)
    if tool.get("type") not in (None, "custom"):
        raise refused(f"{path}.type", f"is {fields.shown(tool['type'])}, a tool of Anthropic's; define your own tools")
    fields.check(tool, _TOOL, f"{path}.")
    return function_tool(tool, f"{path}.", parameters="input_schema")


def _tool_choice(value: Any) -> Any:
    if value is None:
        return None
    choice = fields.mapping(value, "tool_choice")
    fields.check(choice, _CHOICE, "tool_choice.")
    kind = fields.one_of(choice.get("type"), "tool_choice.type", ("auto", "any", "tool", "none"))
    if kind == "tool":
        return named_tool(choice.get("name"), "tool_choice.name")
    return "required" if kind == "any" else kind


def _structure(wanted: dict[str, Any]) -> Structure | None:
    fields.check(wanted, _OUTPUT, "output_config.")
    if wanted.get("format") is None:
        return None
    format_ = fields.mapping(wanted["format"], "output_config.format")
    fields.one_of(format_.get("type"), "output_config.format.type", ("json_schema",))
    return Structure.of(format_.get("schema"), "output_config.format.schema")


def _system(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return "\n".join(fields.text(block["text"], "system") for block in _blocks(value, "system", "system"))


def _messages(value: Any) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    role = ""
    for i, given_message in enumerate(fields.items(value, "messages")):
        path = f"messages[{i}]"
        message = fields.mapping(given_message, path)
        fields.check(message, _MESSAGE, f"{path}.")
        role = fields.one_of(message.get("role"), f"{path}.role", tuple(_IN_ROLE))
        content = message.get("content")
        if role != "assistant" or content != []:  # our own answer has no blocks where the model said nothing
            content = fields.text_or_parts(content, f"{path}.content")
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
    blocks = [fields.mapping(block, f"{path}[{i}]") for i, block in enumerate(fields.items(value, path))]
    for i, block in enumerate(blocks):
        kind = block.get("type")
        if not isinstance(kind, str) or kind not in _IN_ROLE[role]:
            known = ", ".join(_IN_ROLE[role])
            why = f"is {fields.shown(kind)}; a message of the role {role!r} may have blocks of type {known}{TEXT_ONLY}"
            raise refused(f"{path}[{i}].type", why.removesuffix(TEXT_ONLY))
        fields.check(block, _BLOCKS[kind], f"{path}[{i}].")
        if kind == "text":
            fields.text(block.get("text"), f"{path}[{i}].text")
    return blocks


def _joined(blocks: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    texts = [block["text"] for block in blocks]
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": said} for said in texts]


def _assistant(blocks: list[dict[str, Any]], path: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": None}
    if texts := [block for block in blocks if block["type"] == "text"]:
        message["content"] = _joined(texts)
    thoughts = [fields.text(b.get("thinking"), f"{path}.content.thinking") for b in blocks if b["type"] == "thinking"]
    if thought := "".join(thoughts):
        message["reasoning_content"] = thought
    calls = [
        called(
            block.get("id"), block.get("name"), fields.mapping(block.get("input"), f"{at}.input"), f"{at}.id", f"{at}."
        )
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
        said = fields.optional_text(content, f"{path}.content") or ""
    if fields.flag(block.get("is_error"), f"{path}.is_error"):
        said = _as_error(said)
    return {
        "role": "tool",
        "tool_call_id": fields.word(block.get("tool_use_id"), f"{path}.tool_use_id"),
        "content": said,
    }


def _as_error(said: Any) -> Any:
    """A chat template has no place for ``is_error``, so the text says it."""
    first = said if isinstance(said, str) else (said[0]["text"] if said else "")
    if "error" in first[:40].lower():
        return said
    return f"Error: {first}" if isinstance(said, str) or not said else [{"type": "text", "text": "Error:"}, *said]


# ---- answers ---------------------------------------------------------------------------------------------------------


_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}


def body(request: ChatRequest, answers: Sequence[Answer], now: int) -> dict[str, Any]:
    """``signature`` of a thinking block is the reply's id: there is nothing to prove to ourselves."""
    answer = answers[0]
    reply = answer.reply
    content: list[dict[str, Any]] = []
    if reply.reasoning:
        content.append({"type": "thinking", "thinking": reply.reasoning, "signature": reply.reply_id})
    if answer.content:
        content.append({"type": "text", "text": answer.content})
    for call in reply.tool_calls:
        function = call["function"]
        arguments = parse_arguments(function["arguments"])
        if arguments is None:  # only an external model's: our own calls are read strictly
            raise ApiError(
                502, f"the call of {function['name']!r} has arguments that are no JSON object", code="model_failed"
            )
        content.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments})
    reason = _STOP_REASONS.get(reply.finish_reason, "end_turn")
    if answer.refusal is not None and reason == "end_turn":
        reason = "refusal"
    elif reply.stop_sequence is not None and reason == "end_turn":
        reason = "stop_sequence"
    refusal = {"type": "refusal", "category": None, "explanation": answer.refusal}
    return {
        "id": f"msg_{reply.reply_id}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": reply.stop_sequence if reason == "stop_sequence" else None,
        "stop_details": refusal if answer.refusal is not None else None,
        "usage": {
            "input_tokens": reply.prompt_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": reply.completion_tokens,
        },
    }


def events(request: ChatRequest, whole_body: dict[str, Any]) -> Iterator[Event]:
    """The events of ``whole_body``, each with its type as its name."""
    for data in _events(whole_body):
        yield data["type"], data


def _events(whole_body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    ends = {name: whole_body[name] for name in ("stop_reason", "stop_sequence", "stop_details")}
    usage = whole_body["usage"]
    nothing_yet: dict[str, Any] = {"content": [], "usage": {**usage, "output_tokens": 0}, **dict.fromkeys(ends)}
    yield {"type": "message_start", "message": {**whole_body, **nothing_yet}}
    for index, block in enumerate(whole_body["content"]):
        empty, deltas = _block(block)
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        for delta in deltas:
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    yield {"type": "message_delta", "delta": ends, "usage": usage}
    yield {"type": "message_stop"}


def _block(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block before its deltas, and the deltas."""
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": piece} for piece in pieces(block["text"])]
    if block["type"] == "thinking":
        deltas = [{"type": "thinking_delta", "thinking": piece} for piece in pieces(block["thinking"])]
        deltas.append({"type": "signature_delta", "signature": block["signature"]})
        return {**block, "thinking": "", "signature": ""}, deltas
    arguments = json.dumps(block["input"], ensure_ascii=False)
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": p} for p in pieces(arguments)]


def error_events(error: ApiError) -> Iterator[Event]:
    yield "error", error.anthropic()


DIALECT = Dialect(
    route="/v1/messages",
    read=read,
    body=body,
    events=events,
    error=ApiError.anthropic,
    error_events=error_events,
)
