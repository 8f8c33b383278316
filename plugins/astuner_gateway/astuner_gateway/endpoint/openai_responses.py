"""OpenAI's ``/v1/responses``: the request.

The server keeps no conversations: ``previous_response_id`` and the like are refused, and the whole input comes with
each request.  Items that one answer of the model was made of (reasoning, message, function calls, in this order) become
one assistant message again.  `tool_choice` and structures are as in `astuner_gateway.endpoint.openai_chat`.
"""

from __future__ import annotations

from typing import Any

from astuner_gateway.endpoint.errors import ApiError, refused
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
)
from astuner_gateway.endpoint.openai_chat import (
    ACCOUNTING,
    HOSTED,
    ONE_CALL,
    SAMPLING,
    STATE,
    THINKING,
    given,
    read_model,
    read_sampling,
    read_stops,
)
from astuner_gateway.endpoint.openai_messages import called, function_tool, named_tool
from astuner_gateway.endpoint.request import ChatRequest, Dialect, said_in
from astuner_gateway.endpoint.responses_answer import body, error_events, events
from astuner_gateway.endpoint.structure import ANY_OBJECT, Structure

FIELDS: Table = {
    **{
        name: HONOURED
        for name in (
            "model",
            "input",
            "instructions",
            "tools",
            "tool_choice",
            "text",
            "include",
            "reasoning",
            "max_output_tokens",
            "temperature",
            "top_p",
            "stop",
            "stream",
            "stream_options",
        )
    },
    **SAMPLING,
    **ACCOUNTING,
    "background": only(False, why=HOSTED),
    "context_management": only([], why="would rewrite the history, and so break the exact tokens"),
    "conversation": never(STATE),
    "max_tool_calls": LABEL,  # of OpenAI's own tools, of which there are none
    "moderation": never(HOSTED),
    "parallel_tool_calls": only(True, why=ONE_CALL),
    "previous_response_id": never(STATE),
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
    "effort": only("none", why=THINKING),
    "summary": only("auto", why="nobody here writes; the answer has the reasoning itself"),
    "generate_summary": only("auto", why="nobody here writes; the answer has the reasoning itself"),
    "context": only("auto", why=THINKING),
    "mode": only("standard", why=THINKING),
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
    check(given_body, FIELDS)
    check(optional_mapping(given_body.get("stream_options"), "stream_options"), _STREAM_OPTIONS, "stream_options.")
    check(optional_mapping(given_body.get("reasoning"), "reasoning"), _REASONING, "reasoning.")
    include = [
        one_of(entry, f"include[{i}]", _INCLUDABLE)
        for i, entry in enumerate(optional_items(given_body.get("include"), "include"))
    ]
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(optional_items(given_body.get("tools"), "tools"))]
    max_tokens = whole(given_body.get("max_output_tokens"), "max_output_tokens", low=1)
    sampling = read_sampling(given_body)
    instructions = optional_text(given_body.get("instructions"), "instructions")
    messages = _messages(given_body.get("input"))
    if instructions:
        messages.insert(0, {"role": "system", "content": instructions})
    return ChatRequest(
        model=read_model(given_body, model),
        messages=messages,
        tools=tools,
        sampling=given(
            max_tokens=max_tokens,
            **sampling,
            stop=read_stops(given_body.get("stop"), "stop"),
            tool_choice=_tool_choice(given_body.get("tool_choice")),
        ),
        structure=_structure(optional_mapping(given_body.get("text"), "text")),
        stream=flag(given_body.get("stream"), "stream"),
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
    tool = mapping(value, path)
    if tool.get("type") != "function":
        raise refused(f"{path}.type", f"is {shown(tool.get('type'))}; only tools of type 'function' are known")
    check(tool, _TOOL, f"{path}.")
    return function_tool(tool, f"{path}.")


def _tool_choice(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value if value is None else one_of(value, "tool_choice", ("auto", "none", "required"))
    choice = mapping(value, "tool_choice")
    if choice.get("type") != "function":
        raise refused("tool_choice.type", f"is {shown(choice.get('type'))}; only 'function' is known")
    return named_tool(choice.get("name"), "tool_choice.name")


def _structure(wanted: dict[str, Any]) -> Structure | None:
    check(wanted, _TEXT, "text.")
    format_ = optional_mapping(wanted.get("format"), "text.format")
    kind = one_of(format_.get("type", "text"), "text.format.type", ("text", "json_object", "json_schema"))
    if kind == "text":
        return None
    if kind == "json_object":
        return Structure.of(ANY_OBJECT, "text.format")
    return Structure.of(format_.get("schema"), "text.format.schema")


def _messages(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    reader = _Items()
    for i, item in enumerate(items(value, "input")):
        reader.add(mapping(item, f"input[{i}]"), f"input[{i}]")
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
            check(item, _CALL, f"{path}.")
            call = called(item.get("call_id"), item.get("name"), item.get("arguments"), f"{path}.call_id", f"{path}.")
            self._answer().setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            check(item, _OUTPUT, f"{path}.")
            self._other(
                {
                    "role": "tool",
                    "tool_call_id": text(item.get("call_id"), f"{path}.call_id"),
                    "content": _content(item.get("output"), f"{path}.output"),
                }
            )
        elif kind == "reasoning":
            check(item, _REASONING_ITEM, f"{path}.")
            if thought := _thought(item, path):
                self._begin()["reasoning_content"] = thought
                self._only_thought = True
        else:
            why = f"is {shown(kind)}; messages, function calls, their outputs and reasoning are known, and nothing else"
            raise refused(f"{path}.type", why)

    def _message(self, item: dict[str, Any], path: str) -> None:
        check(item, _MESSAGE, f"{path}.")
        role = one_of(item.get("role"), f"{path}.role", ("system", "developer", "user", "assistant"))
        said = _content(text_or_parts(item.get("content"), f"{path}.content"), f"{path}.content")
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
    parts = [_part(mapping(part, f"{path}[{i}]"), f"{path}[{i}]") for i, part in enumerate(items(value, path))]
    return parts[0] if len(parts) == 1 else [{"type": "text", "text": part} for part in parts]


def _part(part: dict[str, Any], path: str) -> str:
    kind = part.get("type")
    if kind != "refusal" and kind not in _TEXT_PARTS:
        raise refused(
            f"{path}.type", f"is {shown(kind)}; the model reads text only, so send parts of type 'input_text'"
        )
    check(part, _PART, f"{path}.")
    if kind == "refusal":
        return said_in(text(part.get("refusal"), f"{path}.refusal"))
    return text(part.get("text"), f"{path}.text")


def _thought(item: dict[str, Any], path: str) -> str:
    """The reasoning itself, or what another model's server wrote instead."""
    for field in ("content", "summary"):
        parts = [mapping(part, f"{path}.{field}") for part in optional_items(item.get(field), f"{path}.{field}")]
        if thought := "".join(text(part.get("text"), f"{path}.{field}[{i}].text") for i, part in enumerate(parts)):
            return thought
    return ""


DIALECT = Dialect(
    route="/v1/responses",
    read=read,
    body=body,
    events=events,
    error=ApiError.openai,
    error_events=error_events,
)
