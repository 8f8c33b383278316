"""OpenAI's ``/v1/responses``.

The server keeps no conversations: ``previous_response_id`` and the like are refused, and the whole input comes with
each request.  Items that one answer of the model was made of (reasoning, message, function calls, in this order) become
one assistant message again.  `tool_choice` and structures are as in `astuner_gateway.endpoint.openai_chat`.
Invariant: the body that ends a stream is the one that the same request gets without a stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from astuner_gateway.endpoint import fields, openai_chat
from astuner_gateway.endpoint.errors import ApiError, refused
from astuner_gateway.endpoint.fields import HONOURED, LABEL, Table, never, only, same
from astuner_gateway.endpoint.openai_messages import called, function_tool
from astuner_gateway.endpoint.request import (
    Answer,
    ChatRequest,
    Dialect,
    Event,
    logprobs_of,
    pieces,
    reasoning_tokens,
    said_in,
)

FIELDS: Table = {
    **same(
        HONOURED,
        "model input instructions tools tool_choice text include reasoning max_output_tokens temperature "
        "top_p stop stream stream_options",
    ),
    **openai_chat.SAMPLING,
    **openai_chat.ACCOUNTING,
    "background": only(False, why=openai_chat.HOSTED),
    "context_management": only([], why="would rewrite the history, and so break the exact tokens"),
    "conversation": never(openai_chat.STATE),
    "max_tool_calls": LABEL,  # of OpenAI's own tools, of which there are none
    "moderation": never(openai_chat.HOSTED),
    "parallel_tool_calls": only(True, why=openai_chat.ONE_CALL),
    "previous_response_id": never(openai_chat.STATE),
    "prompt": never("names a template on OpenAI's own servers"),
    "top_logprobs": only(0, why="are not kept: only the log-probability of the drawn token is"),
    "truncation": only("disabled", why="would rewrite the history, and so break the exact tokens"),
}
_STREAM_OPTIONS: Table = {
    "include_obfuscation": only(False, why="hides lengths from those who listen in, which is not done here"),
}
_TEXT: Table = {
    "format": HONOURED,
    "verbosity": only("medium", why="no model here has a setting for; openai-agents sends it for the model it defaults "
                      "to: name another one, Agent(model='astuner') or OPENAI_DEFAULT_MODEL=astuner"),
}  # fmt: skip
_REASONING: Table = {
    "effort": only("none", why=openai_chat.THINKING),
    "summary": only("auto", why="nobody here writes; the answer has the reasoning itself"),
    "generate_summary": only("auto", why="nobody here writes; the answer has the reasoning itself"),
    "context": only("auto", why=openai_chat.THINKING),
    "mode": only("standard", why=openai_chat.THINKING),
}
_INCLUDE_LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = (
    _INCLUDE_LOGPROBS,
    "reasoning.encrypted_content",  # the reasoning comes in the clear
    "file_search_call.results",  # of tools that no answer here can have used
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
_TOOL: Table = {
    "type": HONOURED,
    "name": HONOURED,
    "description": HONOURED,
    "parameters": HONOURED,
    "strict": LABEL,  # see astuner_gateway.endpoint.openai_messages
    "defer_loading": only(False, why="is for OpenAI's tool search"),
}
_MESSAGE: Table = {"type": HONOURED, "role": HONOURED, "content": HONOURED} | {
    name: LABEL for name in ("id", "status", "phase")
}
_PART: Table = {
    "type": HONOURED,
    "text": HONOURED,
    "refusal": HONOURED,
    "annotations": only([], why="cites sources, which no model here does"),
    "logprobs": LABEL,
    "prompt_cache_breakpoint": LABEL,
}
_CALL: Table = {"type": HONOURED, "call_id": HONOURED, "name": HONOURED, "arguments": HONOURED} | {
    name: LABEL for name in ("id", "status", "parsed_arguments", "caller")
}
_OUTPUT: Table = {"type": HONOURED, "call_id": HONOURED, "output": HONOURED} | {
    name: LABEL for name in ("id", "status", "caller")
}
_REASONING_ITEM: Table = {"type": HONOURED, "content": HONOURED, "summary": HONOURED} | {
    name: LABEL for name in ("id", "status", "encrypted_content")
}
_TEXT_PARTS = ("input_text", "output_text", "text")


def read(given_body: dict[str, Any], model: str) -> ChatRequest:
    """
    :raises ApiError: 400 with the path of what is not honoured.
    """
    fields.check(given_body, FIELDS)
    fields.check(
        fields.optional_mapping(given_body.get("stream_options"), "stream_options"), _STREAM_OPTIONS, "stream_options."
    )
    fields.check(fields.optional_mapping(given_body.get("reasoning"), "reasoning"), _REASONING, "reasoning.")
    include = [
        fields.one_of(entry, f"include[{i}]", _INCLUDABLE)
        for i, entry in enumerate(fields.optional_items(given_body.get("include"), "include"))
    ]
    tools = [
        _tool(tool, f"tools[{i}]") for i, tool in enumerate(fields.optional_items(given_body.get("tools"), "tools"))
    ]
    wanted = fields.optional_mapping(given_body.get("text"), "text")
    fields.check(wanted, _TEXT, "text.")
    max_tokens = fields.whole(given_body.get("max_output_tokens"), "max_output_tokens", low=1)
    sampling = openai_chat.read_sampling(given_body)
    instructions = fields.optional_text(given_body.get("instructions"), "instructions")
    messages = _messages(given_body.get("input"))
    if instructions:
        messages.insert(0, {"role": "system", "content": instructions})
    return ChatRequest(
        model=openai_chat.read_model(given_body, model),
        messages=messages,
        tools=tools,
        sampling=openai_chat.given(
            max_tokens=max_tokens,
            **sampling,
            stop=openai_chat.read_stops(given_body.get("stop"), "stop"),
            tool_choice=openai_chat.read_tool_choice(given_body.get("tool_choice")),
        ),
        structure=openai_chat.read_structure(wanted.get("format"), "text.format"),
        stream=fields.flag(given_body.get("stream"), "stream"),
        logprobs=_INCLUDE_LOGPROBS in include,
        echo={
            "instructions": instructions,
            "max_output_tokens": max_tokens,
            "metadata": given_body.get("metadata") or {},
            "temperature": sampling["temperature"],
            "text": given_body.get("text") or {"format": {"type": "text"}},
            "tool_choice": given_body.get("tool_choice") or "auto",
            "tools": given_body.get("tools") or [],
            "top_p": sampling["top_p"],
        },
    )


def _tool(value: Any, path: str) -> dict[str, Any]:
    tool = fields.mapping(value, path)
    if tool.get("type") != "function":
        raise refused(f"{path}.type", f"is {fields.shown(tool.get('type'))}; only tools of type 'function' are known")
    fields.check(tool, _TOOL, f"{path}.")
    return function_tool(tool, f"{path}.")


def _messages(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    reader = _Items()
    for i, item in enumerate(fields.items(value, "input")):
        reader.add(fields.mapping(item, f"input[{i}]"), f"input[{i}]")
    if not reader.messages:
        raise refused("input", "is empty; there must be at least one message")
    return reader.messages


class _Items:
    """Puts the items of an input together to messages."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        """The assistant message that function calls still belong to."""
        self._only_thought = False
        """Whether it has no more than its reasoning yet, so that a text belongs to it too."""

    def add(self, item: dict[str, Any], path: str) -> None:
        kind = item.get("type", "message")
        if kind == "message":
            self._message(item, path)
        elif kind == "function_call":
            fields.check(item, _CALL, f"{path}.")
            call = called(item.get("call_id"), item.get("name"), item.get("arguments"), f"{path}.call_id", f"{path}.")
            self._answer().setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            fields.check(item, _OUTPUT, f"{path}.")
            self._other(
                {
                    "role": "tool",
                    "tool_call_id": fields.text(item.get("call_id"), f"{path}.call_id"),
                    "content": _content(item.get("output"), f"{path}.output"),
                }
            )
        elif kind == "reasoning":
            fields.check(item, _REASONING_ITEM, f"{path}.")
            if thought := _thought(item, path):
                self._begin()["reasoning_content"] = thought
                self._only_thought = True
        else:
            known = "messages, function calls, their outputs and reasoning are known, and nothing else"
            raise refused(f"{path}.type", f"is {fields.shown(kind)}; {known}")

    def _message(self, item: dict[str, Any], path: str) -> None:
        fields.check(item, _MESSAGE, f"{path}.")
        role = fields.one_of(item.get("role"), f"{path}.role", ("system", "developer", "user", "assistant"))
        said = _content(fields.text_or_parts(item.get("content"), f"{path}.content"), f"{path}.content")
        if role != "assistant":
            self._other({"role": role, "content": said})
        else:
            message = self._open if self._open is not None and self._only_thought else self._begin()
            message["content"] = said
            self._only_thought = False

    def _begin(self) -> dict[str, Any]:
        self._open = {"role": "assistant", "content": None}
        self.messages.append(self._open)
        self._only_thought = False
        return self._open

    def _answer(self) -> dict[str, Any]:
        self._only_thought = False
        return self._begin() if self._open is None else self._open

    def _other(self, message: dict[str, Any]) -> None:
        self._open = None
        self.messages.append(message)


def _content(value: Any, path: str) -> str | list[dict[str, Any]]:
    if isinstance(value, str):
        return value
    parts = [
        _part(fields.mapping(part, f"{path}[{i}]"), f"{path}[{i}]") for i, part in enumerate(fields.items(value, path))
    ]
    return parts[0] if len(parts) == 1 else [{"type": "text", "text": part} for part in parts]


def _part(part: dict[str, Any], path: str) -> str:
    kind = part.get("type")
    if kind != "refusal" and kind not in _TEXT_PARTS:
        raise refused(
            f"{path}.type", f"is {fields.shown(kind)}; the model reads text only, so send parts of type 'input_text'"
        )
    fields.check(part, _PART, f"{path}.")
    if kind == "refusal":
        return said_in(fields.text(part.get("refusal"), f"{path}.refusal"))
    return fields.text(part.get("text"), f"{path}.text")


def _thought(item: dict[str, Any], path: str) -> str:
    """The reasoning itself, or what another model's server wrote instead."""
    for field in ("content", "summary"):
        parts = [
            fields.mapping(part, f"{path}.{field}")
            for part in fields.optional_items(item.get(field), f"{path}.{field}")
        ]
        if thought := "".join(
            fields.text(part.get("text"), f"{path}.{field}[{i}].text") for i, part in enumerate(parts)
        ):
            return thought
    return ""


# ---- answers ---------------------------------------------------------------------------------------------------------


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
        yield from (
            _arguments(item, place) if item["type"] == "function_call" else _part_events(item["content"][0], place)
        )
        yield "response.output_item.done", {"output_index": index, "item": item}
    yield f"response.{whole_body['status']}", {"response": whole_body}


def _arguments(item: dict[str, Any], place: dict[str, Any]) -> Iterator[Event]:
    for piece in pieces(item["arguments"]):
        yield "response.function_call_arguments.delta", {**place, "delta": piece}
    done = {**place, "name": item["name"], "arguments": item["arguments"]}
    yield "response.function_call_arguments.done", done


def _part_events(part: dict[str, Any], place: dict[str, Any]) -> Iterator[Event]:
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


DIALECT = Dialect(
    route="/v1/responses",
    read=read,
    body=body,
    events=events,
    error=ApiError.openai,
    error_events=error_events,
)
