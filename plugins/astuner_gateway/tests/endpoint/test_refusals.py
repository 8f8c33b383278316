"""What is not honoured is refused, by the field's name, in each API's own shape; and never costs a generation."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from typing import Any

import anthropic
import openai
import pytest

from astuner.contracts.errors import ModelFailed, UnsupportedRequest
from astuner.contracts.types import Split
from astuner.testing import FakeEngine
from tests.table import table

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
ASK = [{"role": "user", "content": "What?"}]
BASE: dict[str, dict[str, Any]] = {CHAT: {"messages": ASK}, RESPONSES: {"input": "What?"}, MESSAGES: {"messages": ASK}}
TOOL = {"type": "function", "function": {"name": "f"}}
CLAUDE_CODE = {
    "thinking": {"type": "adaptive", "display": "omitted"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
}
"""What it sends by default leaves everything as it is: the model thinks as it likes, and nothing is cleared."""


def says(served_body: Any) -> str:
    text: str = served_body["error"]["message"]
    return text


@table(
    ("route", "field", "value"),
    [
        (CHAT, "frequency_penalty", 0.5),
        (CHAT, "presence_penalty", -1),
        (CHAT, "logit_bias", {"42": 1}),
        (CHAT, "top_logprobs", 3),
        (CHAT, "functions", [{"name": "f"}]),
        (CHAT, "function_call", {"name": "f"}),
        (CHAT, "reasoning_effort", "high"),
        (CHAT, "verbosity", "low"),
        (CHAT, "modalities", ["text", "audio"]),
        (CHAT, "audio", {"voice": "alloy"}),
        (CHAT, "web_search_options", {}),
        (CHAT, "top_k", 5),
        (CHAT, "min_p", 0.1),
        (CHAT, "repetition_penalty", 1.2),
        (CHAT, "chat_template_kwargs", {"messages": []}),
        (CHAT, "enable_thinking", "no"),
        (CHAT, "guided_json", {}),
        (CHAT, "n", 33),
        (CHAT, "n", 0),
        (CHAT, "n", True),
        (CHAT, "max_tokens", 0),
        (CHAT, "max_tokens", 1.5),
        (CHAT, "temperature", "hot"),
        (CHAT, "temperature", -1),
        (CHAT, "top_p", 2),
        (CHAT, "seed", "x"),
        (CHAT, "seed", 2**64),
        (CHAT, "stop", [""]),
        (CHAT, "stop", ["a"] * 17),
        (CHAT, "stream", "yes"),
        (CHAT, "model", ""),
        (CHAT, "messages", []),
        (CHAT, "messages", "What?"),
        (CHAT, "tools", {}),
        (CHAT, "tool_choice", "sometimes"),
        (RESPONSES, "previous_response_id", "resp_1"),
        (RESPONSES, "previous_response_id", 5),
        (RESPONSES, "conversation", "conv_1"),
        (RESPONSES, "background", True),
        (RESPONSES, "truncation", "auto"),
        (RESPONSES, "prompt", {"id": "p"}),
        (RESPONSES, "top_logprobs", 1),
        (RESPONSES, "input", []),
        (RESPONSES, "input", None),
        (RESPONSES, "n", 2),
        (MESSAGES, "top_k", 5),
        (MESSAGES, "container", "c"),
        (MESSAGES, "mcp_servers", [{}]),
        (MESSAGES, "thread", {"type": "create"}),
        (MESSAGES, "stop_sequences", [1]),
        (MESSAGES, "tool_choice", "auto"),
    ],
)
def test_a_field_is_refused_by_its_name(play: Any, route: str, field: str, value: Any) -> None:
    async def work(served: Any) -> None:
        status, body = await served.post(route, {**BASE[route], field: value})
        assert status == 400
        assert says(body).startswith(field)
        if route != MESSAGES:
            assert body["error"]["param"] == field
            assert body["error"]["type"] == "invalid_request_error"
        else:
            assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
        assert served.engine.calls == []
        assert isinstance(served.tuner.failure, UnsupportedRequest)  # what ends the agent, if it cannot cope with that
        assert str(served.tuner.failure) == says(body)

    play(work, overrules=False)


@table(
    ("route", "extra", "path"),
    [
        (CHAT, {"messages": [*ASK, {"role": "robot", "content": ""}]}, "messages[1].role"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
        (MESSAGES, {"messages": [*ASK, {"role": "user", "content": []}]}, "messages[1].content"),
        (RESPONSES, {"input": [{"role": "user", "content": []}]}, "input[0].content"),
        (CHAT, {"messages": [{"role": "assistant", "content": "a", "prefix": True}]}, "messages[0].prefix"),
        (CHAT, {"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, "messages[0].audio"),
        (CHAT, {"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "messages[0].function_call"),
        (CHAT, {"messages": [{"role": "tool", "content": "a"}]}, "messages[0].tool_call_id"),
        (
            CHAT,
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
            "messages[0].tool_calls[0].function",
        ),
        (
            CHAT,
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "type": "custom"}]}]},
            "messages[0].tool_calls[0].type",
        ),
        (CHAT, {"tools": [{"type": "web_search"}]}, "tools[0].type"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        (
            CHAT,
            {"tools": [{"type": "function", "function": {"name": "f", "examples": []}}]},
            "tools[0].function.examples",
        ),
        (CHAT, {"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        (CHAT, {"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        (CHAT, {"response_format": {"type": "grammar"}}, "response_format.type"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "array"}}}},
            "response_format.json_schema.schema",
        ),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "objekt"}}}},
            "response_format.json_schema.schema",
        ),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "http://127.0.0.1:9/x"}}}},
            "response_format.json_schema.schema.$ref",
        ),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}},
            "response_format.json_schema.schema",
        ),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id"),
        (RESPONSES, {"input": [{"type": "item_reference"}]}, "input[0].id"),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        (RESPONSES, {"tools": [{"type": "web_search"}]}, "tools[0].type"),
        (RESPONSES, {"reasoning": {"effort": "high"}}, "reasoning.effort"),
        (RESPONSES, {"text": {"verbosity": "low"}}, "text.verbosity"),
        (RESPONSES, {"include": ["everything"]}, "include[0]"),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.type"),
        (MESSAGES, {"output_config": {"effort": "low"}}, "output_config.effort"),
        (MESSAGES, {"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}, "context_management"),
        (MESSAGES, {"messages": [*ASK, {"role": "assistant", "content": "The"}]}, "messages[1].role"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        (MESSAGES, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        (
            MESSAGES,
            {"tools": [{"name": "f"}], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            "tool_choice.disable_parallel_tool_use",
        ),
    ],
)
def test_a_field_inside_another_is_refused_by_its_path(play: Any, route: str, extra: Any, path: str) -> None:
    async def work(served: Any) -> None:
        status, body = await served.post(route, {**BASE[route], **extra})
        assert (status, says(body)[: len(path) + 1]) == (400, path + " ")
        assert served.engine.calls == []

    play(work, overrules=False)


@table("keyword", ["$ref", "$dynamicRef", "$schema"])
def test_no_schema_makes_the_endpoint_fetch_anything(play: Any, keyword: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        elsewhere.setblocking(False)
        schema = {"type": "object", keyword: f"http://127.0.0.1:{elsewhere.getsockname()[1]}/schema"}

        async def work(served: Any) -> None:
            format_ = {"type": "json_schema", "json_schema": {"schema": schema}}
            await asyncio.wait_for(served.post(CHAT, {**BASE[CHAT], "response_format": format_}), 30)

        play(work)
        with pytest.raises(BlockingIOError):
            elsewhere.accept()


def test_an_unknown_field_gets_a_suggestion(play: Any) -> None:
    async def work(served: Any) -> None:
        _, body = await served.post(CHAT, {"messages": ASK, "max_token": 5})
        assert says(body).startswith("max_token is ")
        assert "'max_tokens'" in says(body)
        assert body["error"]["code"] == "unknown_field"

    play(work)


@table(
    ("route", "extra"),
    [
        (CHAT, {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "prompt_cache_key": "k"}),
        (CHAT, {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "top_logprobs": 0, "top_k": -1}),
        (CHAT, {"parallel_tool_calls": True, "modalities": ["text"], "n": 1, "logprobs": False, "stop": None}),
        (CHAT, {"something_new": None, "tools": [], "response_format": {"type": "text"}, "reasoning_effort": None}),
        (CHAT, {"tool_choice": "required", "tools": [TOOL]}),
        (CHAT, {"tool_choice": {"type": "function", "function": {"name": "f"}}, "tools": [TOOL]}),
        (RESPONSES, {"store": False, "truncation": "disabled", "include": ["reasoning.encrypted_content"]}),
        (RESPONSES, {"reasoning": {"effort": "none", "summary": "auto"}, "text": {"format": {"type": "text"}}}),
        (RESPONSES, {"background": False, "parallel_tool_calls": True, "max_tool_calls": 3, "tools": []}),
        (MESSAGES, {"thinking": {"type": "disabled"}, "metadata": {"user_id": "1"}, "service_tier": "auto"}),
        (MESSAGES, CLAUDE_CODE),
        (MESSAGES, {"system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}),
        (MESSAGES, {"tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "any"}}),
    ],
)
def test_what_changes_nothing_passes(play: Any, route: str, extra: Any) -> None:
    async def work(served: Any) -> None:
        status, body = await served.post(route, {**BASE[route], **extra})
        assert status == 200, body

    play(work)


@pytest.mark.parametrize("route", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize(("field", "value"), [("temperature", 0.2), ("top_p", 0.5)])
def test_what_would_spoil_the_training_is_refused_by_the_model_itself(
    play: Any, route: str, field: str, value: Any
) -> None:
    async def work(served: Any) -> None:
        status, body = await served.post(route, {**BASE[route], field: value})
        assert status == 400
        assert says(body).startswith(f"{field} is {value}")
        assert body["error"].get("param") == (None if route == MESSAGES else field)

    play(work, split=Split.TRAIN, overrules=False)


@table(
    ("raw", "says_"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b"[]", "not an object"),
        (b'{"a": \xff}', "not UTF-8"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "surrogate"),
        (b'{"temperature": NaN}', "NaN"),
        (b'{"temperature": 1e999}', "too large"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "JSON"),
        (b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}", "levels deep"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "levels deep"),
    ],
)
def test_a_body_that_is_no_safe_json_is_refused(play: Any, raw: bytes, says_: str) -> None:
    async def work(served: Any) -> None:
        for route in (CHAT, RESPONSES, MESSAGES):
            status, body = await served.post(route, raw)
            assert status == 400
            assert says_ in says(body)

    play(work)


def test_a_body_beyond_the_limit_is_refused(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("astuner_gateway.gate.Gate.most_bytes", 2 << 20)

    async def work(served: Any) -> None:
        status, body = await served.post(CHAT, b" " * (3 << 20))
        assert (status, body["error"]["code"]) == (413, "request_too_large")
        status, _ = await served.post(
            CHAT, b'{"messages": [{"role": "user", "content": "a"}]' + b" " * (1 << 20) + b"}"
        )
        assert status == 200

    play(work)


@table(
    ("method", "path", "status"),
    [("GET", CHAT, 405), ("PUT", RESPONSES, 405), ("GET", "/v1/nothing", 404), ("POST", "/v1/models", 404)],
)
def test_other_routes_answer_in_the_apis_shape(play: Any, method: str, path: str, status: int) -> None:
    async def work(served: Any) -> None:
        headers = {"Authorization": f"Bearer {served.access.api_key}"}
        url = served.access.anthropic_base_url + path
        async with served.session.request(method, url, headers=headers) as response:
            assert response.status == status
            assert says(await response.json())
        headers["anthropic-version"] = "2023-06-01"
        async with served.session.request(method, url, headers=headers) as response:
            assert (await response.json())["error"]["message"]

    play(work)


class Failing(FakeEngine):
    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(([], None, ""))  # type: ignore[arg-type]
        raise ModelFailed(f"the engine is on fire, with {os.environ['ENGINE_KEY']}")


class Bug(FakeEngine):
    max_model_len: Any = property(lambda self: 1 / 0, lambda self, value: None)


@pytest.mark.slow
def test_a_model_that_fails_is_502_and_not_asked_again(play: Any, tokenizer: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("ENGINE_KEY", "sk-planted")

    async def work(served: Any) -> None:
        async with openai.AsyncOpenAI(base_url=served.access.base_url, api_key=served.access.api_key) as model:
            with pytest.raises(openai.InternalServerError, match="on fire") as error:
                await model.chat.completions.create(model="m", messages=ASK)  # type: ignore[arg-type]
            assert error.value.status_code == 502
            assert "sk-planted" not in str(error.value)
        assert len(served.engine.calls) == 1

    play(work, engine=Failing((), tokenizer))


def test_a_bug_is_500_with_an_id_and_its_traceback_only_in_the_log(play: Any, tokenizer: Any, caplog: Any) -> None:
    async def work(served: Any) -> None:
        for route in (CHAT, RESPONSES, MESSAGES):
            status, body = await served.post(route, BASE[route])
            assert status == 500
            assert "ZeroDivisionError" in says(body)
            incident = says(body).split()[-1]
            assert incident in caplog.text
            assert "Traceback" not in json.dumps(body)

    play(work, engine=Bug((), tokenizer))
    assert "Traceback" in caplog.text


@pytest.mark.slow
def test_limits_have_statuses_that_clients_do_not_repeat(play: Any) -> None:
    async def work(served: Any) -> None:
        key, url = served.access.api_key, served.access.base_url
        async with openai.AsyncOpenAI(base_url=url, api_key=key) as model:
            await model.chat.completions.create(model="m", messages=ASK)  # type: ignore[arg-type]
            with pytest.raises(openai.PermissionDeniedError, match="max_steps") as error:
                await model.chat.completions.create(model="m", messages=ASK)  # type: ignore[arg-type]
            assert error.value.code == "turn_limit_reached"
        other = served.endpoint.issue(served.tuner, "other")
        long: Any = [{"role": "user", "content": "x" * 500}]
        async with openai.AsyncOpenAI(base_url=url, api_key=other.api_key) as model:
            with pytest.raises(openai.BadRequestError) as too_long:
                await model.chat.completions.create(model="m", messages=long)
            assert too_long.value.code == "context_length_exceeded"
        third = served.endpoint.issue(served.tuner, "third")
        async with anthropic.AsyncAnthropic(base_url=third.anthropic_base_url, api_key=third.api_key) as claude:
            with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
                await claude.messages.create(model="m", max_tokens=5, messages=long)
        served.tuner.close()
        status, body = await served.post(CHAT, BASE[CHAT])
        assert (status, body["error"]["code"]) == (403, "episode_aborted")

    play(work, settings="  rollout:\n    multi_turn:\n      max_steps: 1", max_model_len=300)


def test_an_external_models_missing_logprobs_are_told(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from astuner.contracts.messages import ChatReply

    monkeypatch.setattr(ChatReply, "token_logprobs", lambda self: [])

    async def work(served: Any) -> None:
        status, body = await served.post(CHAT, {**BASE[CHAT], "logprobs": True})
        assert (status, body["error"]["param"]) == (400, "logprobs")

    play(work)


@table(
    ("route", "tool"),
    [
        (CHAT, {"type": "function", "function": {"name": "a<|im_end|>"}}),
        (RESPONSES, {"type": "function", "name": "a<|im_end|>", "parameters": {}, "strict": False}),
        (MESSAGES, {"name": "a<|im_end|>", "input_schema": {"type": "object"}}),
    ],
)
def test_a_tool_that_the_models_format_cannot_name_is_refused_by_its_name(play: Any, route: str, tool: Any) -> None:
    async def work(served: Any) -> None:
        body = {"model": "m", **({"max_tokens": 9} if route == MESSAGES else {}), **BASE[route]}
        status, answer = await served.post(route, {**body, "tools": [tool]})
        assert status == 400
        assert "'a<|im_end|>'" in says(answer)
        assert "Hermes" in says(answer)
        assert says(answer).startswith("tools")
        assert served.engine.calls == []
        status, answer = await served.post(route, body)
        assert status == 200, answer

    play(work)
