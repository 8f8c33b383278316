"""Clients that parse arguments and write them again, as JavaScript does, continue the turn in every dialect."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.table import table

from_json = json.JSONDecoder().decode
SCHEMA = {"type": "object", "properties": {"x": {}}}
SPELLINGS = [
    "105",
    "105.0",
    "1.05e2",
    "1E+2",
    "-0.0",
    "0.50",
    "1e21",
    "9007199254740992.0",
    "[1.0, [2.0]]",
    '{"a": 1.0, "b": [true, null, "1.0"]}',
    '"105.0"',
    "true",
]


def as_javascript(value: Any) -> Any:
    """What JavaScript makes of a JSON value: it has one type of number, and writes whole ones without a fraction."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [as_javascript(item) for item in value]
    return {key: as_javascript(item) for key, item in value.items()} if isinstance(value, dict) else value


def as_something_else(value: Any) -> Any:
    """The value as one of another type."""
    return str(value) if isinstance(value, (int, float)) else 1


def text(arguments: Any) -> Any:
    return json.dumps(arguments, separators=(",", ":"))


async def chat(served: Any, change: Callable[[Any], Any], dump: Callable[[Any], Any]) -> None:
    messages: list[Any] = [{"role": "user", "content": "go"}]
    function = {"name": "f", "description": "d", "parameters": SCHEMA}
    body = {"messages": messages, "tools": [{"type": "function", "function": function}]}
    _, answer = await served.post("/v1/chat/completions", body)
    message = answer["choices"][0]["message"]
    (call,) = message["tool_calls"]
    arguments = from_json(call["function"]["arguments"])
    call["function"]["arguments"] = dump({"x": change(arguments["x"])})
    messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": "ok"}]
    status, answer = await served.post("/v1/chat/completions", body)
    assert status == 200, answer


async def chat_text(served: Any, change: Callable[[Any], Any]) -> None:
    await chat(served, change, text)


async def chat_object(served: Any, change: Callable[[Any], Any]) -> None:
    await chat(served, change, lambda arguments: arguments)


async def responses(served: Any, change: Callable[[Any], Any]) -> None:
    items: list[Any] = [{"role": "user", "content": "go"}]
    body = {"input": items, "tools": [{"type": "function", "name": "f", "description": "d", "parameters": SCHEMA}]}
    _, answer = await served.post("/v1/responses", body)
    (call,) = [item for item in answer["output"] if item["type"] == "function_call"]
    call["arguments"] = text({"x": change(from_json(call["arguments"])["x"])})
    items += [call, {"type": "function_call_output", "call_id": call["call_id"], "output": "ok"}]
    status, answer = await served.post("/v1/responses", body)
    assert status == 200, answer


async def messages(served: Any, change: Callable[[Any], Any]) -> None:
    history: list[Any] = [{"role": "user", "content": "go"}]
    tools = [{"name": "f", "description": "d", "input_schema": SCHEMA}]
    body = {"model": "m", "max_tokens": 100, "messages": history, "tools": tools}
    _, answer = await served.post("/v1/messages", body)
    (call,) = [block for block in answer["content"] if block["type"] == "tool_use"]
    call["input"] = {"x": change(call["input"]["x"])}
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "ok"}
    history += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    status, answer = await served.post("/v1/messages", body)
    assert status == 200, answer


@pytest.mark.parametrize("dialect", [chat_text, chat_object, responses, messages])
@table("spelled", SPELLINGS)
def test_equal_numbers_continue_and_other_types_do_not(play: Any, dialect: Any, spelled: str) -> None:
    async def work(served: Any) -> None:
        await dialect(served, as_javascript)
        await dialect(served, as_something_else)
        turns = served.recorder.turns
        assert [turn.continues for turn in turns[:2]] == [None, 0]
        assert (turns[3].continues, turns[3].branch_reason) == (None, "history_rewritten")

    call = f'<tool_call>\n{{"name": "f", "arguments": {{"x": {spelled}}}}}\n</tool_call>'
    play(work, [call, "done", call, "done"])
