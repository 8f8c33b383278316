"""Anthropic's ``/v1/messages``: the answer, as one body or as the events of a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from astuner.contracts.messages import parse_arguments
from astuner_gateway.endpoint.errors import ApiError
from astuner_gateway.endpoint.request import Answer, ChatRequest, Event
from astuner_gateway.endpoint.sse import pieces

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
