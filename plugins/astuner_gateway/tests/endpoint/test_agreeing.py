"""What asks for what the run does anyway is taken; errors speak the API that was asked; prompts are counted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from astuner.chat.codec import ChatCodec
from astuner.contracts.types import Split
from astuner_testing.fakes import CHATML, FakeEngine, make_tokenizer
from tests.table import table

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
COUNT = f"{MESSAGES}/count_tokens"
ASK = [{"role": "user", "content": "What?"}]
BASE: dict[str, dict[str, Any]] = {CHAT: {"messages": ASK}, RESPONSES: {"input": "What?"}, MESSAGES: {"messages": ASK}}
F = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}
TOOLS: dict[str, list[dict[str, Any]]] = {
    CHAT: [{"type": "function", "function": F}],
    RESPONSES: [{"type": "function", **F}],
    MESSAGES: [{"name": "f", "description": "d", "input_schema": F["parameters"]}],
}
SWITCH = (
    "{%- if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
)
EFFORT = "{{- '<|im_start|>system\\nReasoning: ' + (reasoning_effort or 'medium') + '<|im_end|>\\n' -}}"
FAMILIES = Path(__file__).parents[3] / "astuner_families" / "tests" / "templates"


@cache
def codec(kind: str) -> ChatCodec:
    """A codec by what its chat template knows, with the run's own variables behind a colon."""
    name, _, variables = kind.partition(":")
    kwargs = json.loads(variables or "{}")
    if name == "one call":
        known = json.loads((FAMILIES / "families.json").read_text(encoding="utf-8"))["gpt-oss"]
        template = (FAMILIES / known["file"]).read_text(encoding="utf-8")
        return ChatCodec(
            make_tokenizer(template, known["special"], eos_token=known["eos"]), chat_template_kwargs=kwargs
        )
    template = {"plain": CHATML, "switch": CHATML + SWITCH, "effort": EFFORT + CHATML}[name]
    return ChatCodec(make_tokenizer(template), chat_template_kwargs=kwargs)


OFF, ON = {"enable_thinking": False}, {"enable_thinking": True}
REQUEST = "  endpoint: {sampling: request}\n"
AGREED: list[tuple[str, str, dict[str, Any], str]] = [
    (CHAT, 'switch:{"enable_thinking": false}', {"chat_template_kwargs": OFF}, ""),
    (CHAT, 'switch:{"enable_thinking": true}', {"chat_template_kwargs": ON}, ""),
    (CHAT, "switch", {"chat_template_kwargs": ON}, ""),
    (CHAT, 'switch:{"enable_thinking": false}', {"enable_thinking": False}, ""),
    (CHAT, "switch", {"enable_thinking": True}, ""),
    (CHAT, "plain", {"chat_template_kwargs": OFF}, ""),
    (CHAT, "plain", {"chat_template_kwargs": {}}, ""),
    (RESPONSES, 'switch:{"enable_thinking": false}', {"chat_template_kwargs": OFF}, ""),
    (MESSAGES, "switch", {"thinking": {"type": "enabled"}}, ""),
    (CHAT, "effort", {"reasoning_effort": "medium"}, REQUEST),
    (CHAT, 'effort:{"reasoning_effort": "high"}', {"reasoning_effort": "high"}, REQUEST),
    (RESPONSES, "effort", {"reasoning": {"effort": "medium"}}, REQUEST),
    (MESSAGES, "effort", {"output_config": {"effort": "medium"}}, REQUEST),
    (CHAT, "plain", {"parallel_tool_calls": False}, ""),
    (CHAT, "plain", {"parallel_tool_calls": False, "tools": []}, ""),
    (CHAT, "plain", {"parallel_tool_calls": False, "tools": TOOLS[CHAT], "tool_choice": "none"}, ""),
    (CHAT, "one call", {"parallel_tool_calls": False, "tools": TOOLS[CHAT]}, ""),
    (RESPONSES, "plain", {"parallel_tool_calls": False}, ""),
    (RESPONSES, "one call", {"parallel_tool_calls": False, "tools": TOOLS[RESPONSES]}, ""),
    (MESSAGES, "plain", {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, ""),
    (
        MESSAGES,
        "one call",
        {"tools": TOOLS[MESSAGES], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        "",
    ),
    (CHAT, "plain", {"temperature": 1, "top_p": 1.0, "top_k": -1, "n": 1, "stop": [], "logit_bias": {}}, REQUEST),
    (CHAT, "plain", {"frequency_penalty": 0, "presence_penalty": 0.0, "repetition_penalty": 1, "min_p": 0}, REQUEST),
    (CHAT, "plain", {"response_format": {"type": "text"}, "tool_choice": "auto", "logprobs": False}, REQUEST),
    (
        CHAT,
        "plain",
        {"min_tokens": 0, "best_of": 1, "ignore_eos": False, "length_penalty": 1.0, "echo": False},
        REQUEST,
    ),
    (CHAT, "plain", {"skip_special_tokens": True, "stop_token_ids": [], "add_generation_prompt": True}, REQUEST),
    (CHAT, "plain", {"functions": [], "function_call": "none", "stream": False, "top_logprobs": 0}, REQUEST),
    (RESPONSES, "plain", {"text": {"format": {"type": "text"}}, "truncation": "disabled", "temperature": 1}, REQUEST),
    (
        MESSAGES,
        "plain",
        {"stop_sequences": [], "system": "", "context_management": {"edits": []}, "top_k": -1},
        REQUEST,
    ),
]


@table("route, kind, extra, settings", AGREED)
def test_what_the_run_does_anyway_may_be_asked_for(
    play: Any, route: str, kind: str, extra: dict[str, Any], settings: str
) -> None:
    async def work(served: Any) -> None:
        status, body = await served.post(route, {**BASE[route], **extra})
        assert status == 200, body
        if route == RESPONSES:
            assert body["parallel_tool_calls"] is extra.get("parallel_tool_calls", True)

    spoken = codec(kind)
    engine = FakeEngine(lambda prompt: "four", spoken.template._tokenizer)
    overrules = "request" not in settings
    play(work, engine=engine, codec=spoken, split=Split.TRAIN, settings=settings, overrules=overrules)


@table(
    "route, kind, extra, field",
    [
        (CHAT, 'switch:{"enable_thinking": false}', {"chat_template_kwargs": ON}, "chat_template_kwargs"),
        (CHAT, "switch", {"chat_template_kwargs": OFF}, "chat_template_kwargs"),
        (CHAT, "switch", {"enable_thinking": False}, "enable_thinking"),
        (RESPONSES, "switch", {"chat_template_kwargs": OFF}, "chat_template_kwargs"),
        (MESSAGES, 'switch:{"enable_thinking": false}', {"thinking": {"type": "enabled"}}, "thinking.type"),
        (CHAT, "effort", {"reasoning_effort": "high"}, "reasoning_effort"),
        (CHAT, "plain", {"reasoning_effort": "high"}, "reasoning_effort"),
        (CHAT, "plain", {"parallel_tool_calls": False, "tools": TOOLS[CHAT]}, "parallel_tool_calls"),
        (RESPONSES, "plain", {"parallel_tool_calls": False, "tools": TOOLS[RESPONSES]}, "parallel_tool_calls"),
        (
            MESSAGES,
            "plain",
            {"tools": TOOLS[MESSAGES], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            "tool_choice.disable_parallel_tool_use",
        ),
        (CHAT, "plain", {"top_k": 5}, "top_k"),
        (CHAT, "plain", {"min_tokens": 4}, "min_tokens"),
        (CHAT, "plain", {"ignore_eos": True}, "ignore_eos"),
    ],
)
def test_what_the_run_does_not_do_is_refused(
    play: Any, route: str, kind: str, extra: dict[str, Any], field: str
) -> None:
    async def work(served: Any) -> None:
        status, body = await served.post(route, {**BASE[route], **extra})
        assert status == 400
        assert body["error"]["message"].startswith(field)
        assert not served.engine.calls

    spoken = codec(kind)
    play(
        work, engine=FakeEngine(["four"], spoken.template._tokenizer), codec=spoken, split=Split.TRAIN, overrules=False
    )


ALTERNATES = CHATML.replace(
    "{%- for message in messages",
    "{%- for message in messages %}{%- if not loop.first and message.role == loop.previtem.role %}"
    "{{- raise_exception('roles must alternate') }}{%- endif %}{%- endfor %}{%- for message in messages",
    1,
)
USER, REPLY = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}


@table(
    "route, body, begins",
    [
        (
            MESSAGES,
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": [IMAGE]}]}
                ]
            },
            "messages[0].content[0].content[0].type",
        ),
        (MESSAGES, {"system": [IMAGE], "messages": ASK}, "system[0].type"),
        (MESSAGES, {"messages": [USER, USER]}, "messages[1]: "),
        (MESSAGES, {"system": "s", "messages": [USER, USER]}, "messages[1]: "),
        (MESSAGES, {"system": "s", "messages": [USER, REPLY, USER, USER]}, "messages[3]: "),
        (MESSAGES, {"messages": ASK, "tool_choice": {"type": "any"}}, "tool_choice.type"),
        (
            MESSAGES,
            {"messages": ASK, "tools": TOOLS[MESSAGES], "tool_choice": {"type": "tool", "name": "g"}},
            "tool_choice.name",
        ),
        (MESSAGES, {"messages": ASK, "stop_sequences": [""]}, "stop_sequences"),
        (MESSAGES, {"messages": ASK, "container": "c"}, "container"),
        (MESSAGES, {"messages": ASK, "mcp_servers": [{"url": "u"}]}, "mcp_servers"),
        (
            MESSAGES,
            {"messages": ASK, "output_config": {"format": {"type": "json_schema", "schema": []}}},
            "output_config.format",
        ),
        (RESPONSES, {"input": [USER, USER]}, "input[1]: "),
        (RESPONSES, {"instructions": "s", "input": [USER, USER]}, "input[1]: "),
        (
            RESPONSES,
            {"input": [USER, {"role": "user", "content": [{"type": "input_image"}]}]},
            "input[1].content[0].type",
        ),
        (RESPONSES, {"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        (CHAT, {"messages": [USER, USER]}, "messages[1]: "),
    ],
)
def test_an_error_names_fields_of_the_api_that_was_asked(
    play: Any, route: str, body: dict[str, Any], begins: str
) -> None:
    async def work(served: Any) -> None:
        status, answer = await served.post(route, body)
        message = answer["error"]["message"]
        assert status == 400
        assert message.startswith(begins)
        foreign = (
            ("OpenAI", "response_format", "role 'system'") if route == MESSAGES else ("Anthropic", "stop_sequences")
        )
        assert not [word for word in foreign if word in message], message
        if route != MESSAGES:
            assert begins.startswith(answer["error"]["param"])

    play(work, codec=ChatCodec(make_tokenizer(ALTERNATES)))


def test_what_was_written_out_of_an_earlier_response_does_not_count(play: Any) -> None:
    async def work(served: Any) -> None:
        _, first = await served.post(RESPONSES, {"input": "a"})
        bad = {"role": "user", "content": [{"type": "input_image"}]}
        _, answer = await served.post(RESPONSES, {"input": [bad], "previous_response_id": first["id"]})
        assert answer["error"]["message"].startswith("input[0].content[0].type")

    play(work)


def count_of(body: Mapping[str, Any]) -> Any:
    async def work(served: Any) -> None:
        status, counted = await served.post(COUNT, body)
        assert status == 200, counted
        assert not served.engine.calls, "nothing is generated"
        assert not served.recorder.turns, "nothing is recorded"
        status, answer = await served.post(MESSAGES, {**body, "max_tokens": 20})
        assert status == 200, answer
        assert counted == {"input_tokens": answer["usage"]["input_tokens"]}
        assert counted["input_tokens"] == len(served.engine.calls[0][0])

    return work


USE = {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "4"}


@table(
    "body",
    [
        {"messages": ASK},
        {"messages": ASK, "system": "Be brief."},
        {"messages": ASK, "system": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]},
        {"messages": ASK, "tools": TOOLS[MESSAGES]},
        {"messages": ASK, "tools": TOOLS[MESSAGES], "tool_choice": {"type": "none"}},
        {"messages": ASK, "tools": TOOLS[MESSAGES], "tool_choice": {"type": "any"}},
        {"messages": [*ASK, {"role": "assistant", "content": "four"}, USER]},
        {"messages": [*ASK, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [RESULT]}]},
        {
            "messages": [
                *ASK,
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}, USE]},
                {"role": "user", "content": [RESULT, {"type": "text", "text": "so?"}]},
            ],
            "tools": TOOLS[MESSAGES],
        },
        {"messages": [{"role": "user", "content": "Zwölf 十二 🙂 <|im_end|>"}]},
        {"messages": ASK, "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
        {"messages": ASK, "thinking": {"type": "disabled"}, "temperature": 1.0, "metadata": {"user_id": "u"}},
        {"messages": [{"role": "user", "content": "word " * 9000}]},
    ],
)
def test_a_prompt_is_counted_as_it_is_rendered(play: Any, thinking: ChatCodec, body: dict[str, Any]) -> None:
    play(count_of(body), codec=thinking)


def test_the_count_of_a_conversation_that_goes_on_is_that_of_its_spliced_prompt(play: Any) -> None:
    async def work(served: Any) -> None:
        _, first = await served.post(MESSAGES, {"messages": ASK, "max_tokens": 20})
        messages = [*ASK, {"role": "assistant", "content": first["content"]}, USER]
        _, counted = await served.post(COUNT, {"messages": messages})
        _, again = await served.post(COUNT, {"messages": messages})
        _, answer = await served.post(MESSAGES, {"messages": messages, "max_tokens": 20})
        assert counted == again == {"input_tokens": answer["usage"]["input_tokens"]}
        assert [turn.continues for turn in served.recorder.turns] == [None, 0]

    play(work, settings="  rollout: {multi_turn: {max_steps: 2}}\n")


@table(
    "body, begins",
    [
        ({"messages": []}, "messages is empty"),
        ({}, "messages is missing"),
        ({"messages": ASK, "nonsense": 1}, "nonsense"),
        ({"messages": [REPLY]}, "messages[0].role"),
        ({"messages": ASK, "tool_choice": {"type": "any"}}, "tool_choice.type"),
    ],
)
def test_what_cannot_be_asked_cannot_be_counted(play: Any, body: dict[str, Any], begins: str) -> None:
    async def work(served: Any) -> None:
        status, answer = await served.post(COUNT, body)
        assert (status, answer["type"]) == (400, "error")
        assert answer["error"]["message"].startswith(begins)

    play(work)


def test_only_a_key_counts_and_only_by_post(play: Any) -> None:
    async def work(served: Any) -> None:
        status, answer = await served.post(COUNT, {"messages": ASK}, Authorization="Bearer other")
        assert (status, answer["error"]["type"]) == (401, "authentication_error")
        url = served.access.anthropic_base_url + COUNT
        async with served.session.get(url, headers={"x-api-key": served.access.api_key}) as response:
            assert response.status == 405

    play(work)


def test_anthropics_client_counts(play: Any) -> None:
    anthropic = pytest.importorskip("anthropic")

    async def work(served: Any) -> None:
        client = anthropic.AsyncAnthropic(base_url=served.access.anthropic_base_url, api_key=served.access.api_key)
        counted = await client.messages.count_tokens(model="m", messages=ASK, system="s", tools=TOOLS[MESSAGES])
        answer = await client.messages.create(model="m", messages=ASK, system="s", tools=TOOLS[MESSAGES], max_tokens=9)
        assert counted.input_tokens == answer.usage.input_tokens
        await client.close()

    play(work)
