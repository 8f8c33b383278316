"""OpenAI's ``/v1/responses``: the answer, as one body or as the events of a stream.

Invariant: the body that ends a stream is the one that the same request gets without a stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from astuner_gateway.endpoint.errors import ApiError
from astuner_gateway.endpoint.request import Answer, ChatRequest, Event, logprobs_of, reasoning_tokens
from astuner_gateway.endpoint.sse import pieces


def body(request: ChatRequest, answers: Sequence[Answer], now: int) -> dict[str, Any]:
    """``usage.output_tokens_details.reasoning_tokens`` counts up to the end of the reasoning's text."""
    answer = answers[0]
    reply = answer.reply
    cut = reply.finish_reason == "length"
    return {
        "id": f"resp_{reply.reply_id}",
        "object": "response",
        "created_at": now,
        "status": "incomplete" if cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "model": request.model,
        "output": _items(request, answer, "incomplete" if cut else "completed"),
        "background": False,
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "truncation": "disabled",
        "user": None,
        **request.echo,
        "usage": {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": reply.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": reasoning_tokens(reply)},
            "total_tokens": reply.prompt_tokens + reply.completion_tokens,
        },
    }


def _items(request: ChatRequest, answer: Answer, status: str) -> list[dict[str, Any]]:
    reply = answer.reply
    found: list[dict[str, Any]] = []
    if reply.reasoning:
        thought = {"type": "reasoning_text", "text": reply.reasoning}
        found.append({"id": f"rs_{reply.reply_id}", "type": "reasoning", "summary": [], "content": [thought]})
    if answer.content or answer.refusal is not None or not reply.tool_calls:
        part: dict[str, Any]
        if answer.refusal is not None:
            part = {"type": "refusal", "refusal": answer.refusal}
        else:
            logprobs = logprobs_of(reply) if request.logprobs else []
            part = {"type": "output_text", "text": answer.content or "", "annotations": [], "logprobs": logprobs}
        found.append(
            {
                "id": f"msg_{reply.reply_id}",
                "type": "message",
                "role": "assistant",
                "status": status,
                "content": [part],
            }
        )
    for n, call in enumerate(reply.tool_calls):
        found.append(
            {
                "id": f"fc_{reply.reply_id}_{n}",
                "type": "function_call",
                "call_id": call["id"],
                "name": call["function"]["name"],
                "arguments": call["function"]["arguments"],
                "status": "completed",
            }
        )
    return found


def events(request: ChatRequest, whole_body: dict[str, Any]) -> Iterator[Event]:
    """The events of ``whole_body``, numbered."""
    for number, (kind, data) in enumerate(_events(whole_body)):
        yield kind, {"type": kind, "sequence_number": number, **data}


def _events(whole_body: dict[str, Any]) -> Iterator[Event]:
    nothing_yet: dict[str, Any] = {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    started = {"response": {**whole_body, **nothing_yet}}
    yield "response.created", started
    yield "response.in_progress", started
    for index, item in enumerate(whole_body["output"]):
        empty: dict[str, dict[str, Any]] = {
            "function_call": {"arguments": "", "status": "in_progress"},
            "reasoning": {"content": []},
        }
        begun = {**item, **empty.get(item["type"], {"content": [], "status": "in_progress"})}
        yield "response.output_item.added", {"output_index": index, "item": begun}
        place = {"item_id": item["id"], "output_index": index}
        yield from _arguments(item, place) if item["type"] == "function_call" else _part(item["content"][0], place)
        yield "response.output_item.done", {"output_index": index, "item": item}
    yield f"response.{whole_body['status']}", {"response": whole_body}


def _arguments(item: dict[str, Any], place: dict[str, Any]) -> Iterator[Event]:
    for piece in pieces(item["arguments"]):
        yield "response.function_call_arguments.delta", {**place, "delta": piece}
    done = {**place, "name": item["name"], "arguments": item["arguments"]}
    yield "response.function_call_arguments.done", done


def _part(part: dict[str, Any], place: dict[str, Any]) -> Iterator[Event]:
    """The one part of a message or of a reasoning item."""
    kind = part["type"]
    field = "refusal" if kind == "refusal" else "text"
    place = {**place, "content_index": 0}
    extra: dict[str, Any] = {"logprobs": []} if kind == "output_text" else {}
    yield "response.content_part.added", {**place, "part": {**part, field: "", **extra}}
    for piece in pieces(part[field]):
        yield f"response.{kind}.delta", {**place, "delta": piece, **extra}
    whole_extra = {"logprobs": part["logprobs"]} if kind == "output_text" else {}
    yield f"response.{kind}.done", {**place, field: part[field], **whole_extra}
    yield "response.content_part.done", {**place, "part": part}


def error_events(error: ApiError) -> Iterator[Event]:
    """OpenAI's ``error`` event; client libraries look for ``error`` in it as well."""
    flat = {"code": error.code, "message": error.message, "param": error.param, "sequence_number": 0}
    yield "error", {"type": "error", **flat, **error.openai()}
