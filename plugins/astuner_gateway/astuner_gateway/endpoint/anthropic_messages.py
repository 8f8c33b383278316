"""Translate requests and answers of Anthropic's ``/v1/messages``.

`tool_choice` and structures (``output_config.format``) work as in `astuner_gateway.endpoint.openai_chat`. A reply that
does not match the requested structure has no text and ``stop_reason: refusal``. A last message of the assistant
(prefill) is rejected, because a turn of the model starts where its chat template starts it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from astuner.contracts.messages import parse_arguments
from astuner_gateway.endpoint import fields, openai_chat
from astuner_gateway.endpoint.errors import NO_THREADS, ApiError, refused
from astuner_gateway.endpoint.openai_chat import called, function_tool, joined, named_tool, some
from astuner_gateway.endpoint.request import Answer, ChatRequest, Dialect, Event, pieces
from astuner_gateway.endpoint.structure import Structure

# ---- messages: blocks are read by their type ------------------------------------------------------------------------


def _blocks(where: str, **readers: fields.Reader) -> fields.Reader:
    """Return a reader of the blocks that ``where`` allows."""
    return fields.tagged(readers, f"{where} accepts blocks of type {', '.join(readers)}")


_TEXT = fields.Said("text", type=fields.text, text=fields.text, **fields.not_honoured("anthropic_messages.text"))
_SYSTEM = fields.text_or(_blocks("system", text=_TEXT), may_be_empty=True)
_RESULT_TEXTS = fields.text_or(_blocks("a tool_result", text=_TEXT), may_be_empty=True)
_THINKING = fields.Said("thinking", "signature", type=fields.text, thinking=fields.text)
_TOOL_USE = fields.Said(
    "id name input",
    type=fields.text,
    id=fields.text,
    name=fields.word,
    input=fields.mapping,
    **fields.not_honoured("anthropic_messages.tool_use"),
)
_TOOL_RESULT = fields.Said(
    "tool_use_id",
    "cache_control",
    type=fields.text,
    tool_use_id=fields.word,
    content=_RESULT_TEXTS,
    is_error=fields.flag,
)
_CONTENT = {
    "user": fields.text_or(_blocks("a message with role 'user'", text=_TEXT, tool_result=_TOOL_RESULT)),
    "assistant": fields.text_or(
        _blocks("a message with role 'assistant'", text=_TEXT, thinking=_THINKING, tool_use=_TOOL_USE)
    ),
    "system": fields.text_or(_blocks("a message with role 'system'", text=_TEXT)),
}
_MESSAGE = fields.Said("role", role=fields.one_of(*_CONTENT), content=fields.anything)


def _message(value: Any, path: str) -> list[dict[str, Any]]:
    """Return the messages for one value: each tool result becomes a message, and adjacent texts are joined."""
    given = _MESSAGE(value, path)
    role, content = given["role"], given.get("content")
    if role != "assistant" or content != []:  # the endpoint's own answer has no blocks if the model generated no text
        content = _CONTENT[role](content, f"{path}.content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if role == "assistant":
        return [_reply(content)]
    messages: list[dict[str, Any]] = []
    for kind, blocks in itertools.groupby(content, lambda block: block["type"]):
        if kind == "text":
            messages.append({"role": role, "content": joined(blocks)})
        else:
            messages += map(_result, blocks)
    return messages


def _reply(blocks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    texts = [block for block in blocks if block["type"] == "text"]
    message: dict[str, Any] = {"role": "assistant", "content": joined(texts) if texts else None}
    if thought := "".join(block["thinking"] for block in blocks if block["type"] == "thinking"):
        message["reasoning_content"] = thought
    if uses := [block for block in blocks if block["type"] == "tool_use"]:
        message["tool_calls"] = [
            called(use["id"], use["name"], json.dumps(use["input"], ensure_ascii=False)) for use in uses
        ]
    return message


def _result(block: Mapping[str, Any]) -> dict[str, Any]:
    said: Any = joined(block.get("content", ""))
    if block.get("is_error"):
        said = _as_error(said)
    return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": said}


def _as_error(said: Any) -> Any:
    """Mark a tool result as an error in its text, because chat templates do not support ``is_error``."""
    first = said if isinstance(said, str) else (said[0]["text"] if said else "")
    if "error" in first[:40].lower():
        return said
    return f"Error: {first}" if isinstance(said, str) or not said else [{"type": "text", "text": "Error:"}, *said]


_MESSAGES = fields.items(_message)


def _messages(value: Any, path: str) -> list[dict[str, Any]]:
    each = _MESSAGES(value, path)
    messages = openai_chat.Placed(some([message for several in each for message in several], path))
    messages.places = [f"{path}[{n}]" for n, several in enumerate(each) for _ in several]
    if each[-1][-1]["role"] == "assistant":
        why = "is 'assistant', but the endpoint cannot continue a started reply. End with a message of the user"
        raise refused(f"{path}[{len(each) - 1}].role", why)
    return messages


# ---- the request -----------------------------------------------------------------------------------------------------

_TOOL = fields.Shape(
    "name",
    name=fields.word,
    description=fields.text,
    input_schema=fields.mapping,
    **fields.not_honoured("anthropic_messages.tool"),
)
_FORMAT = fields.one_of("json_schema")


def _tool(value: Any, path: str) -> dict[str, Any]:
    kind = fields.mapping(value, path).get("type")
    if kind not in (None, "custom"):
        raise refused(
            f"{path}.type", f"is {fields.shown(kind)}, a tool that only Anthropic runs. Define your own tools"
        )
    tool = _TOOL(value, path)
    return function_tool(tool["name"], tool.get("description"), tool.get("input_schema"))


def _structure(value: Any, path: str) -> Structure:
    wanted = fields.mapping(value, path)
    _FORMAT(wanted.get("type"), f"{path}.type")
    return Structure.of(wanted.get("schema"), f"{path}.schema")


FIELDS = fields.Shape(
    "messages",
    **openai_chat.ASKED,
    messages=_messages,
    system=_SYSTEM,
    tools=fields.items(_tool),
    tool_choice=fields.Shape(
        "type",
        type=fields.one_of("auto", "any", "tool", "none"),
        name=fields.word,
        **fields.not_honoured("anthropic_messages.tool_choice"),
    ),
    max_tokens=fields.number(1, whole=True),
    stop_sequences=openai_chat.read_stops,
    thinking=fields.Shape(**fields.not_honoured("anthropic_messages.thinking")),
    output_config=fields.Shape(format=_structure, **fields.not_honoured("anthropic_messages.output_config")),
    **fields.not_honoured("anthropic_messages"),
)


def read(given_body: dict[str, Any], model: str, told: object = None) -> ChatRequest:
    """Return the request in a body.

    :param told: Unused, because messages contain no references.
    :raises ApiError: 400 with the path of a field that is not honored.
    """
    if given_body.get("thread") is not None:
        raise refused("thread", f"is not supported: {FIELDS.fields['thread'].why}", code=NO_THREADS)
    given, left_out = fields.counted(FIELDS, given_body)
    system = given.get("system", "")
    if system := system if isinstance(system, str) else "\n".join(block["text"] for block in system):
        given["messages"].prepend({"role": "system", "content": system}, "system")
    if choice := given.get("tool_choice"):
        given["tool_choice"] = "required" if choice["type"] == "any" else choice["type"]
        if choice["type"] == "tool":
            given["tool_choice"] = named_tool(fields.word(choice.get("name"), "tool_choice.name"))
        _check_choice(choice, given.get("tools", ()))
    if "stop_sequences" in given:
        given["stop"] = given["stop_sequences"]
    return openai_chat.asked(given, model, structure=given.get("output_config", {}).get("format"), left_out=left_out)


def _check_choice(choice: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> None:
    """Check that the tool choice names offered tools.

    :raises ApiError: 400, the choice requires tools that are not offered.
    """
    names = [tool["function"]["name"] for tool in tools]
    if choice["type"] == "any" and not names:
        raise refused("tool_choice.type", 'is "any", but the request offers no tools. Leave tool_choice out')
    if choice["type"] == "tool" and choice["name"] not in names:
        known = ", ".join(names) or "none"
        raise refused("tool_choice.name", f"is {fields.shown(choice['name'])}, but the offered tools are: {known}")


# ---- answers ---------------------------------------------------------------------------------------------------------


_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}


def body(request: ChatRequest, answers: Sequence[Answer], now: int) -> dict[str, Any]:
    """Return the body of an answer.

    The ``signature`` of a thinking block is the ID of the reply, because the endpoint does not verify it.
    """
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
        if arguments is None:  # only external models: calls of the policy are parsed strictly
            raise ApiError(
                502, f"the arguments of tool call {function['name']!r} are not a JSON object", code="model_failed"
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
    """Yield the events of ``whole_body``, each named by its type."""
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
    """Return an empty block and its deltas."""
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": piece} for piece in pieces(block["text"])]
    if block["type"] == "thinking":
        deltas = [{"type": "thinking_delta", "thinking": piece} for piece in pieces(block["thinking"])]
        deltas.append({"type": "signature_delta", "signature": block["signature"]})
        return {**block, "thinking": "", "signature": ""}, deltas
    arguments = json.dumps(block["input"], ensure_ascii=False)
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": p} for p in pieces(arguments)]


DIALECT = Dialect(
    route="/v1/messages",
    read=read,
    body=body,
    events=events,
    error=ApiError.anthropic,
    error_events=lambda error: [("error", error.anthropic())],
    names={
        "stop": "stop_sequences",
        "response_format": "output_config.format",
        "tool_choice": "tool_choice.type",
    },
)
COUNT_ROUTE = f"{DIALECT.route}/count_tokens"
