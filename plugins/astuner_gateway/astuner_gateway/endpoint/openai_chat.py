"""OpenAI's ``/v1/chat/completions``.

``tool_choice`` never constrains the sampling (the log-probabilities would no longer be the policy's): ``none`` reads no
calls, and whether the model complied with the others is for the agent to see.  So too ``response_format``: content that
is there has the structure; else ``refusal`` says what is missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from astuner_gateway.endpoint import fields
from astuner_gateway.endpoint.errors import ApiError, refused
from astuner_gateway.endpoint.fields import HONOURED, LABEL, Field, Table, never, only, same
from astuner_gateway.endpoint.openai_messages import named_tool, read_messages, read_tools
from astuner_gateway.endpoint.request import Answer, ChatRequest, Dialect, Event, logprobs_of, pieces
from astuner_gateway.endpoint.structure import ANY_OBJECT, Structure

MAX_CHOICES = 32
MAX_STOPS = 16

DISTORTS = "distorts the distribution that tokens are drawn from; ASTuner draws from the policy's own alone"
THINKING = "no model here takes from a request; set astuner.model.chat_template_kwargs for the whole run"
TEXT_MODEL = "the model, which reads and writes text only, cannot do"
ONE_CALL = "only constrained sampling could promise"
STATE = "would need conversations kept on the server; send the whole input with each request"
HOSTED = "is done by OpenAI's own servers"

SAMPLING: Table = {
    "frequency_penalty": only(0, why=DISTORTS),
    "presence_penalty": only(0, why=DISTORTS),
    "repetition_penalty": only(1, why=DISTORTS),
    "logit_bias": only({}, why=DISTORTS),
    "top_k": only(-1, 0, why=DISTORTS),
    "min_p": only(0, why=DISTORTS),
    "enable_thinking": never(THINKING),
    "chat_template_kwargs": only({}, why=THINKING),
}
ACCOUNTING: Table = same(
    LABEL,
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_options prompt_cache_retention",
)
FIELDS: Table = {
    **same(
        HONOURED,
        "model messages tools tool_choice response_format n stop seed logprobs max_tokens "
        "max_completion_tokens temperature top_p stream stream_options",
    ),
    **SAMPLING,
    **ACCOUNTING,
    "parallel_tool_calls": only(True, why=ONE_CALL),
    "top_logprobs": only(0, why="are not kept: only the log-probability of the drawn token is"),
    "modalities": only(["text"], why=TEXT_MODEL),
    "audio": never(TEXT_MODEL),
    "functions": never("OpenAI replaced by tools"),
    "function_call": never("OpenAI replaced by tool_choice"),
    "prediction": Field(always_harmless=True),  # makes OpenAI's servers faster, and no answer different
    "reasoning_effort": only("none", why=THINKING),
    "verbosity": only("medium", why="no model here has a setting for; ask for it in the prompt"),
    "moderation": never(HOSTED),
    "web_search_options": never(HOSTED),
}
_STREAM_OPTIONS: Table = {
    "include_usage": HONOURED,
    "include_obfuscation": only(False, why="hides lengths from those who listen in, which is not done here"),
}
_FORMATS = ("text", "json_object", "json_schema")


def read(body: dict[str, Any], model: str) -> ChatRequest:
    """
    :raises ApiError: 400 with the path of what is not honoured.
    """
    fields.check(body, FIELDS)
    stream_options = fields.optional_mapping(body.get("stream_options"), "stream_options")
    fields.check(stream_options, _STREAM_OPTIONS, "stream_options.")
    limits = [fields.whole(body.get(name), name, low=1) for name in ("max_tokens", "max_completion_tokens")]
    return ChatRequest(
        model=read_model(body, model),
        messages=read_messages(body.get("messages")),
        tools=read_tools(body["tools"]) if body.get("tools") is not None else (),
        sampling=given(
            max_tokens=min((limit for limit in limits if limit is not None), default=None),
            **read_sampling(body),
            seed=fields.whole(body.get("seed"), "seed", low=-(2**63), high=2**63 - 1),
            stop=read_stops(body.get("stop"), "stop"),
            tool_choice=read_tool_choice(body.get("tool_choice"), "function"),
        ),
        structure=read_structure(body.get("response_format"), "response_format"),
        n=fields.whole(body.get("n"), "n", low=1, high=MAX_CHOICES) or 1,
        stream=fields.flag(body.get("stream"), "stream"),
        include_usage=fields.flag(stream_options.get("include_usage"), "stream_options.include_usage"),
        logprobs=fields.flag(body.get("logprobs"), "logprobs"),
    )


def read_model(body: Mapping[str, Any], model: str) -> str:
    """The name the client uses: any; the key says which model it is."""
    return model if body.get("model") is None else fields.word(body["model"], "model")


def read_sampling(body: Mapping[str, Any]) -> dict[str, float | None]:
    return {
        "temperature": fields.number(body.get("temperature"), "temperature", low=0, high=100),
        "top_p": fields.number(body.get("top_p"), "top_p", low=0, high=1),
    }


def read_stops(value: Any, path: str) -> list[str] | None:
    """Stop strings: one, or a list."""
    if value is None:
        return None
    stops = [fields.word(stop, path) for stop in ([value] if isinstance(value, str) else fields.items(value, path))]
    if len(stops) > MAX_STOPS:
        raise refused(path, f"has {len(stops)} entries; at most {MAX_STOPS} are looked for")
    return stops or None


def given(**options: Any) -> dict[str, Any]:
    """The options that a request has."""
    return {name: value for name, value in options.items() if value is not None}


def read_tool_choice(value: Any, holder: str = "") -> Any:
    """``tool_choice``, in the words of chat completions.

    :param holder: the field of a choice that holds the tool's name; empty: the choice itself does.
    """
    if value is None or isinstance(value, str):
        return value if value is None else fields.one_of(value, "tool_choice", ("auto", "none", "required"))
    choice, path = fields.mapping(value, "tool_choice"), "tool_choice"
    if choice.get("type") != "function":
        raise refused("tool_choice.type", f"is {fields.shown(choice.get('type'))}; only 'function' is known")
    if holder:
        path = f"tool_choice.{holder}"
        choice = fields.mapping(choice.get(holder), path)
    return named_tool(choice.get("name"), f"{path}.name")


def read_structure(value: Any, path: str) -> Structure | None:
    """The structure that is asked for; its schema is beside the type, or in a ``json_schema`` of its own."""
    wanted = fields.optional_mapping(value, path)
    kind = fields.one_of(wanted.get("type", "text"), f"{path}.type", _FORMATS)
    if kind == "text":
        return None
    if kind == "json_object":
        return Structure.of(ANY_OBJECT, path)
    if own := path == "response_format":
        wanted = fields.mapping(wanted.get("json_schema"), f"{path}.json_schema")
    return Structure.of(wanted.get("schema"), f"{path}.json_schema.schema" if own else f"{path}.schema")


# ---- answers ---------------------------------------------------------------------------------------------------------


def body(request: ChatRequest, answers: Sequence[Answer], now: int) -> dict[str, Any]:
    """``usage`` counts the prompt once, as OpenAI does, and the tokens of every choice."""
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
                "message": _message(answer),
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


def _message(answer: Answer) -> dict[str, Any]:
    reply = answer.reply
    said: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": answer.refusal}
    if reply.reasoning:
        said["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        said["content"] = answer.content or None
        said["tool_calls"] = list(reply.tool_calls)
    return said


def events(request: ChatRequest, whole_body: dict[str, Any]) -> Iterator[Event]:
    """The chunks of ``whole_body``."""
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


def _error_events(error: ApiError) -> Iterator[Event]:
    yield "", error.openai()


DIALECT = Dialect(
    route="/v1/chat/completions",
    read=read,
    body=body,
    events=events,
    error=ApiError.openai,
    error_events=_error_events,
    end=b"data: [DONE]\n\n",
)
