"""Translate OpenAI's ``/v1/responses``.

The items of an agent's episode are stored (`Told`), so ``previous_response_id`` and ``item_reference`` can be replaced
by their contents before the input is read; nothing else is stored. Items of one answer of the model (reasoning,
message, function calls, in this order) become one assistant message again. `tool_choice` and structures work as in
`astuner_gateway.endpoint.openai_chat`. Invariant: the last body of a stream equals the body that the same request gets
without streaming.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from astuner_gateway.endpoint import fields, openai_chat
from astuner_gateway.endpoint.errors import ApiError, refused
from astuner_gateway.endpoint.openai_chat import (
    FUNCTIONS_ONLY,
    REFUSAL_PART,
    TEXT_PART,
    Placed,
    arguments,
    called,
    function_tool,
    joined,
    named_tool,
    some,
)
from astuner_gateway.endpoint.request import Answer, ChatRequest, Dialect, Event, logprobs_of, pieces, reasoning_tokens

_INCLUDE_LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = fields.one_of(
    _INCLUDE_LOGPROBS,
    "reasoning.encrypted_content",  # reasoning is returned unencrypted
    "file_search_call.results",  # of tools that no answer of the endpoint can have used
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)

# ---- stored answers --------------------------------------------------------------------------------------------------

KEPT_BYTES = 4 << 20
"""Maximum bytes of the conversations that `Told` stores. The newest one is stored whatever its size."""
_REFERENCE = "item_reference"


class Told:
    """All items that one agent received in its episode, and the conversations of the newest responses."""

    def __init__(self) -> None:
        self._items: dict[str, Mapping[str, Any]] = {}
        self._conversations: OrderedDict[str, tuple[Sequence[Any], int]] = OrderedDict()
        self._bytes = 0

    def keep(self, response: Mapping[str, Any], history: Sequence[Any], size: int) -> None:
        """Store the items of an answer and its conversation; the request had ``size`` bytes."""
        self._items.update((item["id"], item) for item in response["output"])
        whole = [*history, *response["output"]]
        size += 8 * len(whole)  # the items before the new ones are mostly shared with an earlier conversation
        self._conversations[response["id"]] = whole, size
        self._bytes += size
        while self._bytes > KEPT_BYTES and len(self._conversations) > 1:
            self._bytes -= self._conversations.popitem(last=False)[1][1]

    def written_out(self, new: Any, before: Any) -> Any:
        """Return the ``input`` of a request with all references replaced by the items to which they refer.

        :raises ApiError: 400, an ID is unknown in this episode.
        """
        items = [{"role": "user", "content": new}] if isinstance(new, str) else new
        if isinstance(items, list):
            seen: set[str] = set()
            items = [self._found(item, f"input[{i}].id", seen) for i, item in enumerate(items)]
        if before is None or not isinstance(items, list):
            return items  # anything else is rejected when it is read
        known = self._conversations.get(fields.text(before, "previous_response_id"))
        if known is None:
            why = f"is {fields.shown(before)}, which is {_NOT_TOLD}. Send the full input instead"
            raise refused("previous_response_id", why, code="previous_response_not_found")
        written_out = _WrittenOut([*known[0], *items])
        written_out.known = len(known[0])
        return written_out

    def _found(self, item: Any, path: str, seen: set[str]) -> Any:
        if not isinstance(item, dict) or item.get("type") != _REFERENCE:
            return item
        name = fields.text(item.get("id"), path)
        if name not in self._items:
            raise refused(
                path, f"is {fields.shown(name)}, which is {_NOT_TOLD}. Send the item itself", code="not_found"
            )
        if name in seen:
            raise refused(path, f"is {fields.shown(name)}, but the input refers to it twice", code="duplicate_item")
        seen.add(name)
        return self._items[name]


_NOT_TOLD = "not stored: it is not from this agent and episode, was created with store: false, or is too old"

# ---- the input -------------------------------------------------------------------------------------------------------

_PART = fields.tagged(
    {
        **dict.fromkeys(("input_text", "output_text", "text"), TEXT_PART),
        "refusal": lambda value, path: {"text": REFUSAL_PART(value, path)["refusal"]},
    },
    "the model reads text only. Send parts of type 'input_text'",
)
_THOUGHTS = fields.items(lambda value, path: fields.text(fields.mapping(value, path).get("text"), f"{path}.text"))

_MESSAGE = fields.Said(
    "role content",
    "type id status phase",
    role=fields.one_of("system", "developer", "user", "assistant"),
    content=fields.text_or(_PART),
)
_CALL = fields.Said(
    "call_id name arguments",
    "type id status parsed_arguments caller",
    call_id=fields.text,
    name=fields.word,
    arguments=arguments,
)
_OUTPUT = fields.Said(
    "call_id output",
    "type id status caller",
    call_id=fields.text,
    output=fields.text_or(_PART, may_be_empty=True),
)
_REASONING = fields.Said("", "type id status encrypted_content", content=_THOUGHTS, summary=_THOUGHTS)


def _message(value: Any, path: str) -> dict[str, Any]:
    item = _MESSAGE(value, path)
    return {"role": item["role"], "content": joined(item["content"])}


def _call(value: Any, path: str) -> dict[str, Any]:
    item = _CALL(value, path)
    call = called(item["call_id"], item["name"], item["arguments"])
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _output(value: Any, path: str) -> dict[str, Any]:
    item = _OUTPUT(value, path)
    return {"role": "tool", "tool_call_id": item["call_id"], "content": joined(item["output"])}


def _reasoning(value: Any, path: str) -> dict[str, Any] | None:
    """Read the reasoning itself, or the summary that another model's server wrote instead."""
    item = _REASONING(value, path)
    thought = "".join(item.get("content", ())) or "".join(item.get("summary", ()))
    return {"role": "assistant", "content": None, "reasoning_content": thought} if thought else None


_ITEM = fields.tagged(
    {"message": _message, "function_call": _call, "function_call_output": _output, "reasoning": _reasoning},
    "only messages, function calls, function call outputs and reasoning are supported",
    default="message",
)
_EARLIER = "previous_response_id"


class _WrittenOut(list[Any]):
    """The items of an input, preceded by the conversation to which it refers."""

    known = 0
    """Number of items that belong to that conversation."""


def _messages(value: Any, path: str) -> Placed:
    """Return the messages of an input; calls, and a text after reasoning, join the reply before them."""
    messages = Placed()
    messages.places = []
    if isinstance(value, str):
        messages.prepend({"role": "user", "content": value}, path)
        return messages
    known = getattr(value, "known", 0)
    for n, given in enumerate(fields.items(fields.anything)(value, path)):
        place = _EARLIER if n < known else f"{path}[{n - known}]"
        item = _ITEM(given, place)
        if not item:
            continue
        last = messages[-1] if messages else {}
        only_thought = last.get("content", "") is None and "tool_calls" not in last
        if "tool_calls" in item and last.get("role") == "assistant":
            last.setdefault("tool_calls", []).extend(item["tool_calls"])
        elif only_thought and item["role"] == "assistant" and "reasoning_content" not in item:
            last["content"] = item["content"]
        else:
            messages.append(item)
            messages.places.append(place)
    some(messages, path)
    return messages


_TOOL = fields.Shape(
    "name",
    name=fields.word,
    description=fields.text,
    parameters=fields.mapping,
    **fields.not_honoured("openai_responses.tool"),
)
_CHOICE = fields.Shape("name", "type", name=fields.word)
FIELDS = fields.Shape(
    "input",
    **openai_chat.OPENAI,
    input=_messages,
    previous_response_id=fields.text,
    instructions=fields.text,
    tools=fields.items(
        fields.tagged({"function": lambda value, path: function_tool(**_TOOL(value, path))}, FUNCTIONS_ONLY)
    ),
    tool_choice=openai_chat.choice_of(lambda value, path: named_tool(_CHOICE(value, path)["name"])),
    text=fields.Shape(format=openai_chat.read_structure, **fields.not_honoured("openai_responses.text")),
    include=fields.items(_INCLUDABLE),
    reasoning=fields.Shape(**fields.not_honoured("openai_responses.reasoning")),
    max_output_tokens=fields.number(1, whole=True),
    stream_options=fields.Shape(**openai_chat.STREAM_OPTIONS),
    **fields.not_honoured("openai_responses"),
)


def read(given_body: dict[str, Any], model: str, told: Told | None = None) -> ChatRequest:
    """Return the request in a body.

    :param told: Stored answers to which the input may refer; None if references are not possible.
    :raises ApiError: 400 with the path of a field that is not honored.
    """
    before, stored = given_body.get("previous_response_id"), told is not None and given_body.get("store") is not False
    if told is not None:
        given_body = {**given_body, "input": told.written_out(given_body.get("input"), before)}
    elif before is not None:
        raise refused("previous_response_id", FIELDS.fields["conversation"].why)
    given, left_out = fields.counted(FIELDS, given_body)
    if "max_output_tokens" in given:
        given["max_tokens"] = given["max_output_tokens"]
    messages, instructions = given["input"], given.get("instructions")
    if instructions:
        messages.prepend({"role": "system", "content": instructions}, "instructions")
    return openai_chat.asked(
        {**given, "messages": messages},
        model,
        structure=given.get("text", {}).get("format"),
        logprobs=_INCLUDE_LOGPROBS in given.get("include", ()),
        left_out=left_out,
        history=given_body["input"] if stored else None,
        echo={
            "instructions": instructions,
            "max_output_tokens": given.get("max_tokens"),
            "metadata": given_body.get("metadata") or {},
            "previous_response_id": before,
            "store": stored,
            "temperature": given.get("temperature"),
            "text": given_body.get("text") or {"format": {"type": "text"}},
            "tool_choice": given_body.get("tool_choice") or "auto",
            "tools": given_body.get("tools") or [],
            "top_p": given.get("top_p"),
        },
    )


# ---- answers ---------------------------------------------------------------------------------------------------------


def body(request: ChatRequest, answers: Sequence[Answer], now: int) -> dict[str, Any]:
    """Return the body of an answer.

    ``usage.output_tokens_details.reasoning_tokens`` counts up to the end of the reasoning's text.
    """
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
        "reasoning": {"effort": None, "summary": None},
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
    """Yield the numbered events of ``whole_body``."""
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
    """Yield the events of the only part of a message or reasoning item."""
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


def error_events(error: ApiError) -> list[Event]:
    """Return OpenAI's ``error`` event; client libraries also read the key ``error`` in it."""
    flat = {"code": error.code, "message": error.message, "param": error.param, "sequence_number": 0}
    return [("error", {"type": "error", **flat, **error.openai()})]


DIALECT = Dialect(
    route="/v1/responses",
    read=read,
    body=body,
    events=events,
    error=ApiError.openai,
    error_events=error_events,
    names={
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "response_format": "text.format",
        "logprobs": "include",
    },
)
