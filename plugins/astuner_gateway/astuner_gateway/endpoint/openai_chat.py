"""Translate OpenAI's ``/v1/chat/completions``, whose messages and tools are also the common form of all dialects.

Values are checked and copied, so later code receives valid input only. ``tool_choice`` never constrains the sampling,
because log-probabilities would no longer be the policy's: with ``none``, calls are not parsed; for other values, the
agent checks whether the model complied. ``response_format`` does not constrain it either: content that is returned
matches the structure, otherwise ``refusal`` describes the mismatch. Invariant: a returned message contains only the
fields that the chat codec reads. A field that would change the answer is rejected by its path; others are left out and
counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from astuner_gateway.endpoint import fields
from astuner_gateway.endpoint.errors import ApiError, refused
from astuner_gateway.endpoint.request import Answer, ChatRequest, Dialect, Event, logprobs_of, pieces, said_in
from astuner_gateway.endpoint.structure import ANY_OBJECT, Structure

MAX_CHOICES = 32
MAX_STOPS = 16

# ---- messages and tools ----------------------------------------------------------------------------------------------

TEXT_ONLY = "the model reads text only. Send parts of type 'text'"
FUNCTIONS_ONLY = "only tools of type 'function' are supported"


def arguments(value: Any, path: str) -> str:
    """Read the arguments of a tool call: a JSON string, or the object itself."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else fields.text(value, path)


def refusal(value: Any, path: str) -> str:
    """Return the model's own text from a refusal of the endpoint; return any other refusal unchanged."""
    return said_in(fields.text(value, path))


def called(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a tool call in OpenAI's format."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def function_tool(name: str, description: str | None = None, parameters: Any = None) -> dict[str, Any]:
    """Return the tool as the model sees it, identical for every API."""
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def named_tool(name: str) -> dict[str, Any]:
    """Return a ``tool_choice`` that names one tool, in the format of chat completions."""
    return {"type": "function", "function": {"name": name}}


def joined(said: str | Iterable[Mapping[str, str]]) -> str | list[dict[str, str]]:
    """Return the content of a message for a string or parts; a single part becomes a string."""
    if isinstance(said, str):
        return said
    parts = [{"type": "text", "text": part["text"]} for part in said]
    return parts[0]["text"] if len(parts) == 1 else parts


_PART = fields.not_honoured("openai_part")
TEXT_PART = fields.Said("text", text=fields.text, **_PART)
REFUSAL_PART = fields.Said("refusal", refusal=refusal, **_PART)


def _part(value: Any, path: str) -> dict[str, str]:
    return {"type": "text", "text": TEXT_PART(value, path)["text"]}


def _replied(value: Any, path: str) -> dict[str, str]:
    """Read a text part; AgentScope 1.0.7 sends null as the text of a message that contains only a tool call."""
    return _part({**value, "text": ""} if value.get("text", "") is None else value, path)


def _refused(value: Any, path: str) -> dict[str, str]:
    return {"type": "text", "text": REFUSAL_PART(value, path)["refusal"]}


_SAID = fields.text_or(fields.tagged({"text": _part, "refusal": _refused}, TEXT_ONLY, default="text"))
_REPLIED = fields.text_or(fields.tagged({"text": _replied, "refusal": _refused}, TEXT_ONLY, default="text"))
_CALL = fields.Said(
    "id function", "type index", id=fields.text,
    function=fields.Said("name arguments", "parsed_arguments", name=fields.word, arguments=arguments),
)  # fmt: skip


def _call(value: Any, path: str) -> dict[str, Any]:
    call = _CALL(value, path)
    return called(call["id"], **call["function"])


_MESSAGE = fields.Said(
    "role",
    role=fields.one_of("system", "developer", "user", "assistant", "tool"),
    content=fields.anything,
    name=fields.text,
    tool_calls=fields.items(fields.tagged({"function": _call}, FUNCTIONS_ONLY, default="function")),
    tool_call_id=fields.text,
    reasoning_content=fields.text,
    reasoning=fields.text,  # name of reasoning_content on newer servers
    refusal=refusal,
    **fields.not_honoured("openai_message"),
)


_WRITTEN = frozenset(("role", "content", "refusal", "tool_calls"))
_FUNCTION = frozenset(("name", "arguments"))


def _as_usual(message: Any) -> dict[str, Any] | None:
    """Read common messages (texts, results, ASTuner's own calls) ten times faster; None for any other."""
    if type(message) is not dict:
        return None
    role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
    is_text = type(content) is str
    if role != "assistant":
        is_result = role == "tool" and len(message) == 3 and type(message.get("tool_call_id")) is str
        return dict(message) if is_text and (is_result or (len(message) == 2 and role in ("user", "system"))) else None
    if not message.keys() <= _WRITTEN or message.get("refusal") is not None:
        return None
    if calls is None:
        return {"role": role, "content": content} if is_text else None
    if not (is_text or content is None) or type(calls) is not list or not 0 < len(calls) <= MAX_CHOICES:
        return None
    made = []
    for call in calls:
        if type(call) is not dict or len(call) != 3 or call.get("type") != "function":
            return None
        label, function = call.get("id"), call.get("function")
        if type(label) is not str or type(function) is not dict or function.keys() != _FUNCTION:
            return None
        name, text = function["name"], function["arguments"]
        if type(name) is not str or not name or type(text) is not str:
            return None
        made.append(called(label, name, text))
    return {"role": role, "content": content, "tool_calls": made}


def _message(value: Any, path: str) -> dict[str, Any]:
    usual = _as_usual(value)
    return _by_fields(value, path) if usual is None else usual


def _by_fields(value: Any, path: str) -> dict[str, Any]:
    given = _MESSAGE(value, path)
    role, content, calls = given["role"], given.get("content"), given.get("tool_calls")
    is_reply = role == "assistant"
    if calls and not is_reply:
        raise refused(f"{path}.tool_calls", f"are in a message with role {role!r}, but only the assistant calls tools")
    thought = given.get("reasoning") or given.get("reasoning_content")
    if role in ("assistant", "tool") and (content is None or content == []):
        # A model or a tool may return no text, or use other fields; frameworks send this back as null or [].
        says_otherwise = is_reply and (calls or given.get("refusal") or thought)
        said: Any = None if says_otherwise else ""
    else:
        said = (_REPLIED if is_reply else _SAID)(content, f"{path}.content")
    message: dict[str, Any] = {"role": role, "content": said}
    if "name" in given:
        message["name"] = given["name"]
    if role == "tool":
        message["tool_call_id"] = fields.text(given.get("tool_call_id"), f"{path}.tool_call_id")
    if not is_reply:
        return message
    if given.get("refusal") and not said:
        message["content"] = given["refusal"]
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = calls
    return message


class Placed(list[dict[str, Any]]):
    """Messages with the paths in the body from which they were read."""

    places: list[str]

    def prepend(self, message: dict[str, Any], place: str) -> None:
        self.insert(0, message)
        self.places.insert(0, place)


_MESSAGES = fields.items(_message)


def read_messages(value: Any, path: str = "messages") -> list[dict[str, Any]]:
    """Read the ``messages`` of a chat completion.

    :raises ApiError: 400 with the path of an invalid value.
    """
    return some(_MESSAGES(value, path), path)


def some(messages: list[dict[str, Any]], path: str) -> list[dict[str, Any]]:
    """Return the messages if there is at least one.

    :raises ApiError: 400, the list is empty.
    """
    if not messages:
        raise refused(path, "is empty, but must contain at least one message")
    return messages


_TOOL = fields.Shape(
    "function",
    "type cache_control",
    # strict: sampling is never constrained; the agent has to check the arguments in any case.
    function=fields.Shape("name", "strict", name=fields.word, description=fields.text, parameters=fields.mapping),
)


def _tool(value: Any, path: str) -> dict[str, Any]:
    return function_tool(**_TOOL(value, path)["function"])


read_tools = fields.items(fields.tagged({"function": _tool}, FUNCTIONS_ONLY, default="function"))
"""Reader of a chat completion's tools; raises `ApiError`."""


# ---- the request -----------------------------------------------------------------------------------------------------

_all_stops = fields.items(fields.anything)


def read_stops(value: Any, path: str) -> list[str] | None:
    """Read stop strings: one or a list; None for an empty list."""
    stops = [fields.word(stop, path) for stop in ([value] if isinstance(value, str) else _all_stops(value, path))]
    if len(stops) > MAX_STOPS:
        raise refused(path, f"has {len(stops)} entries, but at most {MAX_STOPS} are allowed")
    return stops or None


def choice_of(tool: fields.Reader) -> fields.Reader:
    """Return a reader of ``tool_choice`` in the format of chat completions.

    :param tool: Reader of the name in a choice that names a tool.
    """
    words = fields.one_of("auto", "none", "required")
    named = fields.tagged({"function": tool}, "only 'function' is supported")
    return lambda value, path: (words if isinstance(value, str) else named)(value, path)


_CHOICE = fields.Shape("function", "type", function=fields.Shape("name", name=fields.word))
_FORMATS = fields.one_of("text", "json_object", "json_schema")


def read_structure(value: Any, path: str) -> Structure | None:
    """Read the requested structure; its schema is next to the type or in a ``json_schema`` object."""
    wanted = fields.mapping(value, path)
    kind = _FORMATS(wanted.get("type", "text"), f"{path}.type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Structure.of(ANY_OBJECT, path)
    if path == "response_format":
        path = f"{path}.json_schema"
        wanted = fields.mapping(wanted.get("json_schema"), path)
    return Structure.of(wanted.get("schema"), f"{path}.schema")


ASKED: dict[str, fields.Reader | fields.Field] = {
    "model": fields.word,
    "stream": fields.flag,
    "temperature": fields.number(0, 100),
    "top_p": fields.number(0, 1),
}
"""Fields of every dialect."""
OPENAI: dict[str, fields.Reader | fields.Field] = {**ASKED, "stop": read_stops, **fields.not_honoured("openai")}
"""Fields of both OpenAI APIs."""
STREAM_OPTIONS = fields.not_honoured("stream_options")
FIELDS = fields.Shape(
    "messages",
    **OPENAI,
    messages=read_messages,
    tools=read_tools,
    tool_choice=choice_of(lambda value, path: named_tool(_CHOICE(value, path)["function"]["name"])),
    response_format=read_structure,
    n=fields.number(1, MAX_CHOICES, whole=True),
    seed=fields.number(-(2**63), 2**63 - 1, whole=True),
    logprobs=fields.flag,
    max_tokens=fields.number(1, whole=True),
    max_completion_tokens=fields.number(1, whole=True),
    stream_options=fields.Shape(include_usage=fields.flag, **STREAM_OPTIONS),
    **fields.not_honoured("openai_chat"),
)


def read(body: dict[str, Any], model: str, told: object = None) -> ChatRequest:
    """Return the request in a body.

    :param told: Unused, because chat completions contain no references.
    :raises ApiError: 400 with the path of a field that is not honored.
    """
    given, left_out = fields.counted(FIELDS, body)
    limits = [given[name] for name in ("max_tokens", "max_completion_tokens") if name in given]
    if limits:
        given["max_tokens"] = min(limits)
    return asked(
        given,
        model,
        structure=given.get("response_format"),
        n=given.get("n", 1),
        include_usage=given.get("stream_options", {}).get("include_usage", False),
        logprobs=given.get("logprobs", False),
        left_out=left_out,
    )


_SAMPLING = ("max_tokens", "temperature", "top_p", "seed", "stop", "tool_choice")
"""Keywords of `ModelTuner.chat` that a request can set."""


def asked(given: Mapping[str, Any], model: str, **more: Any) -> ChatRequest:
    """Return the request, for any API.

    :param given: Its fields in the format of chat completions.
    :param model: Name of the model for a request without one.
    :param more: Additional fields of `ChatRequest`.
    """
    return ChatRequest(
        model=given.get("model", model),
        messages=given["messages"],
        places=getattr(given["messages"], "places", ()),
        tools=given.get("tools", ()),
        sampling={name: given[name] for name in _SAMPLING if name in given},
        stream=given.get("stream", False),
        **more,
    )


# ---- answers ---------------------------------------------------------------------------------------------------------


def body(request: ChatRequest, answers: Sequence[Answer], now: int) -> dict[str, Any]:
    """Return the body of an answer; ``usage`` counts the prompt once, as OpenAI does, and the tokens of all choices."""
    first = answers[0].reply
    completion = sum(answer.reply.completion_tokens for answer in answers)
    return {
        "id": f"chatcmpl-{first.reply_id}",
        "object": "chat.completion",
        "created": now,
        "model": request.model,
        "choices": [
            {
                "index": index,
                "message": _reply(answer),
                "finish_reason": answer.reply.finish_reason,
                "logprobs": {"content": logprobs_of(answer.reply), "refusal": None} if request.logprobs else None,
            }
            for index, answer in enumerate(answers)
        ],
        "usage": {
            "prompt_tokens": first.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": first.prompt_tokens + completion,
        },
    }


def _reply(answer: Answer) -> dict[str, Any]:
    reply = answer.reply
    said: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": answer.refusal}
    if reply.reasoning:
        said["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        said["content"] = answer.content or None
        said["tool_calls"] = list(reply.tool_calls)
    return said


def events(request: ChatRequest, whole_body: dict[str, Any]) -> Iterator[Event]:
    """Yield the chunks of ``whole_body``."""
    head = {**whole_body, "object": "chat.completion.chunk"}
    usage = head.pop("usage")
    if request.include_usage:
        head["usage"] = None

    def chunk(index: int, delta: dict[str, Any], finish: str | None = None, logprobs: Any = None) -> Event:
        choice = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
        return "", {**head, "choices": [choice]}

    for choice in whole_body["choices"]:
        index, message = choice["index"], choice["message"]
        yield chunk(index, {"role": "assistant", "content": ""})
        for field in ("reasoning_content", "content", "refusal"):
            for piece in pieces(message.get(field) or ""):
                yield chunk(index, {field: piece})
        for n, call in enumerate(message.get("tool_calls", ())):
            function = call["function"]
            yield chunk(index, {"tool_calls": [{"index": n, **call, "function": {**function, "arguments": ""}}]})
            for piece in pieces(function["arguments"]):
                yield chunk(index, {"tool_calls": [{"index": n, "function": {"arguments": piece}}]})
        yield chunk(index, {}, choice["finish_reason"], choice["logprobs"])
    if request.include_usage:
        yield "", {**head, "choices": [], "usage": usage}


DIALECT = Dialect(
    route="/v1/chat/completions",
    read=read,
    body=body,
    events=events,
    error=ApiError.openai,
    error_events=lambda error: [("", error.openai())],
    end=b"data: [DONE]\n\n",
)
