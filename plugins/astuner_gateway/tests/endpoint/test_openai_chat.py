"""Chat completions, as OpenAI's own client sees them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from astuner_gateway.endpoint.errors import ApiError
from astuner_gateway.endpoint.openai_chat import _as_usual, _by_fields
from tests.table import table

ASK = {"role": "user", "content": "What is 2 + 2?"}
TOOL = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
        "strict": True,
    },
}
CALL = '<tool_call>\n{"name": "calc", "arguments": {"x":1}}\n</tool_call>'


def client(served: Any, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=served.access.base_url, api_key=served.access.api_key, **options)


def test_an_answer_has_text_usage_and_a_finish_reason(play: Any) -> None:
    async def work(served: Any) -> None:
        async with client(served) as model:
            done = await model.chat.completions.create(model="gpt-4o", messages=[ASK])
            turn = served.recorder.turns[0]
            assert (done.object, done.model) == ("chat.completion", "gpt-4o")
            assert done.choices[0].message.content == "four"
            assert done.choices[0].message.tool_calls is None
            assert done.choices[0].finish_reason == "stop"
            assert done.usage.prompt_tokens == len(turn.generation.prompt_ids)
            assert done.usage.completion_tokens == len(turn.generation.response_ids)
            assert done.usage.total_tokens == done.usage.prompt_tokens + done.usage.completion_tokens
            cut = await model.chat.completions.create(model="gpt-4o", messages=[ASK], max_tokens=2)
            assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("fo", "length")
            assert cut.usage.completion_tokens == 2

    play(work)


@table("stream", [False, True])
def test_a_tool_loop_continues_the_models_own_tokens(play: Any, stream: bool) -> None:
    async def work(served: Any) -> None:
        async with client(served) as model:
            messages: list[Any] = [ASK]
            for _ in range(2):
                options: dict[str, Any] = {"model": "m", "messages": messages, "tools": [TOOL]}
                if stream:
                    async with model.chat.completions.stream(**options) as events:
                        done = await events.get_final_completion()
                else:
                    done = await model.chat.completions.create(**options)
                message = done.choices[0].message
                messages.append(message.model_dump())
                for call in message.tool_calls or ():
                    assert json.loads(call.function.arguments) == {"x": 1}
                    assert call.function.arguments == '{"x":1}'
                    assert done.choices[0].finish_reason == "tool_calls"
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": "4"})
            assert message.content == "four"

        first, second = served.recorder.turns
        assert (second.continues, [m["role"] for m in second.request]) == (0, ["tool"])
        shown = first.tools[0]["function"]
        assert list(shown) == [
            "name",
            "description",
            "parameters",
        ]  # and not strict, which is no concern of the model's

    play(work, [CALL, "four"])


def test_a_stream_is_cut_from_the_whole_reply_and_ends_with_the_usage(play: Any) -> None:
    text = "Schön. " * 100

    async def work(served: Any) -> None:
        async with client(served) as model:
            stream = await model.chat.completions.create(
                model="m", messages=[ASK], stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            deltas = [c.choices[0].delta.content or "" for c in chunks if c.choices]
            assert "".join(deltas) == text
            assert len([d for d in deltas if d]) > 3
            assert chunks[0].choices[0].delta.role == "assistant"
            assert [c.choices[0].finish_reason for c in chunks[-2:-1]] == ["stop"]
            assert chunks[-1].choices == []
            assert chunks[-1].usage.completion_tokens == len(served.recorder.turns[0].generation.response_ids)
            assert len({c.id for c in chunks}) == 1
            plain = await served.stream("/v1/chat/completions", {"messages": [ASK]})
            assert plain.endswith("data: [DONE]\n\n")
            assert '"usage"' not in plain

    play(work, lambda prompt: text)


def test_n_draws_are_asked_for_at_once_and_answered_in_order(play: Any) -> None:
    said = iter(f"draw {i}" for i in range(9))

    async def work(served: Any) -> None:
        async with client(served) as model:
            done = await model.chat.completions.create(model="m", messages=[ASK], n=3)
            assert [c.index for c in done.choices] == [0, 1, 2]
            assert {c.message.content for c in done.choices} == {"draw 0", "draw 1", "draw 2"}
            generations = [t.generation for t in served.recorder.turns]
            assert done.usage.prompt_tokens == len(generations[0].prompt_ids)
            assert done.usage.completion_tokens == sum(len(g.response_ids) for g in generations)
            stream = await model.chat.completions.create(model="m", messages=[ASK], n=2, stream=True)
            texts = {0: "", 1: ""}
            async for chunk in stream:
                texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
            assert set(texts.values()) == {"draw 3", "draw 4"}

    play(work, lambda prompt: next(said))


def test_stop_strings_end_the_answer_and_its_tokens(play: Any) -> None:
    async def work(served: Any) -> None:
        async with client(served) as model:
            done = await model.chat.completions.create(model="m", messages=[ASK], stop=["Obs:", "never"])
            assert (done.choices[0].message.content, done.choices[0].finish_reason) == ("think ", "stop")
            assert done.usage.completion_tokens == len("think Obs:")

    play(work, lambda prompt: "think Obs: more")


@table("stream", [False, True])
def test_logprobs_are_those_of_every_token(play: Any, stream: bool) -> None:
    async def work(served: Any) -> None:
        async with client(served) as model:
            options: dict[str, Any] = {"model": "m", "messages": [ASK], "logprobs": True}
            if stream:
                async with model.chat.completions.stream(**options) as events:
                    done: Any = await events.get_final_completion()
            else:
                done = await model.chat.completions.create(**options)
            tokens = done.choices[0].logprobs.content
            assert len(tokens) == done.usage.completion_tokens if not stream else len(tokens) == 5
            assert [t.token for t in tokens][:4] == list("four")
            assert {t.logprob for t in tokens} == {-0.5}
            assert tokens[0].bytes == [ord("f")]

    play(work)


@table("said", ["a😀ü", "汉字", "👩‍👩‍👧", "é\u0301", "x\x00y"])
def test_the_bytes_of_all_tokens_are_the_answer(play: Any, said: str) -> None:
    async def work(served: Any) -> None:
        async with client(served) as model:
            done = await model.chat.completions.create(model="m", messages=[ASK], logprobs=True)
            *tokens, end = done.choices[0].logprobs.content
            assert bytes(byte for token in tokens for byte in token.bytes).decode() == done.choices[0].message.content
            assert bytes(end.bytes) == b"<|im_end|>"
            done = await model.responses.create(model="m", input="?", include=["message.output_text.logprobs"])
            part = done.output[0].content[0]
            assert bytes(byte for token in part.logprobs[:-1] for byte in token.bytes).decode() == part.text

    play(work, lambda prompt: said)


class Reply(BaseModel):
    value: int


STRUCTURED = '<tool_call>\n{"name": "generate_structured_output", "arguments": %s}\n</tool_call>'


@table("said", ['{"value": 4}', STRUCTURED % '{"value": 4}'])
def test_a_structure_comes_as_text_or_by_its_tool(play: Any, said: str) -> None:
    async def work(served: Any) -> None:
        async with client(served) as model:
            done = await model.chat.completions.parse(model="m", messages=[ASK], response_format=Reply)
            assert done.choices[0].message.parsed == Reply(value=4)
            assert done.choices[0].finish_reason == "stop"

    play(work, lambda prompt: said)


@table(
    ("said", "why"),
    [
        ("four", "not JSON"),
        ('{"value": "4"}', 'is not of type "integer"'),
        (STRUCTURED % '{"x": 1}', '"value" is a required property'),
    ],
)
def test_without_the_structure_there_is_a_refusal_that_says_why(play: Any, said: str, why: str) -> None:
    async def work(served: Any) -> None:
        async with client(served) as model:
            done = await model.chat.completions.parse(model="m", messages=[ASK], response_format=Reply)
            message = done.choices[0].message
            assert message.content is None
            assert why in message.refusal
            # What the model said comes back as what it said, so the next turn continues this one.
            history: list[Any] = [ASK, message.model_dump(exclude={"parsed"}), {"role": "user", "content": "Again."}]
            await model.chat.completions.parse(model="m", messages=history, response_format=Reply)
        assert [t.continues for t in served.recorder.turns] == [None, 0]

    play(work, lambda prompt: said)


def test_text_beside_tool_calls_is_left_out_where_content_must_have_a_structure(play: Any) -> None:
    async def work(served: Any) -> None:
        async with client(served) as model:
            done = await model.chat.completions.parse(
                model="m", messages=[ASK], tools=[TOOL], response_format={"type": "json_object"}
            )
            message = done.choices[0].message
            assert (message.content, message.refusal, len(message.tool_calls)) == (None, None, 1)

    play(work, lambda prompt: "Let me see.\n" + CALL)


def test_any_json_object_is_one(play: Any) -> None:
    async def ask(served: Any) -> Any:
        body = {"messages": [ASK], "response_format": {"type": "json_object"}}
        return (await served.post("/v1/chat/completions", body))[1]["choices"][0]["message"]

    assert play(ask, lambda prompt: '{"a": [1]}')["content"] == '{"a": [1]}'
    assert "not a JSON object" in play(ask, lambda prompt: "[1]")["refusal"]
    assert "not JSON" in play(ask, lambda prompt: '{"a": NaN}')["refusal"]


def test_reasoning_is_shown_and_may_come_back(play: Any, thinking: Any) -> None:
    async def work(served: Any) -> None:
        async with client(served) as model:
            done = await model.chat.completions.create(model="m", messages=[ASK])
            message: Any = done.choices[0].message
            assert (message.content, message.reasoning_content) == ("four", "2 and 2")
            async with model.chat.completions.stream(model="m", messages=[ASK, message.model_dump(), ASK]) as events:
                streamed: Any = (await events.get_final_completion()).choices[0].message
            assert streamed.reasoning_content == "2 and 2"
        assert [t.continues for t in served.recorder.turns] == [None, 0]

    play(work, lambda prompt: "<think>\n2 and 2\n</think>\n\nfour", codec=thinking)


def test_many_agents_ask_at_once(play: Any) -> None:
    async def work(served: Any) -> None:
        clients = {name: served.endpoint.issue(served.tuner, name) for name in ("wolf", "villager")}
        async with openai.AsyncOpenAI(base_url=served.access.base_url, api_key="-", max_retries=0) as model:

            async def ask(name: str, i: int) -> str:
                headers = {"Authorization": f"Bearer {clients[name].api_key}"}
                messages: Any = [{"role": "user", "content": f"{name} {i}"}]
                done = await model.chat.completions.create(model="m", messages=messages, extra_headers=headers)
                return done.choices[0].message.content or ""

            asked = [(name, i) for name in clients for i in range(20)]
            assert await asyncio.gather(*(ask(*a) for a in asked)) == [f"{name} {i}" for name, i in asked]
        assert sorted(t.agent for t in served.recorder.turns) == ["villager"] * 20 + ["wolf"] * 20

    play(work, lambda prompt: prompt.rpartition("user\n")[2].partition("<|im_end|>")[0])


def test_each_of_n_draws_has_a_seed_of_its_own(play: Any) -> None:
    async def work(served: Any) -> None:
        for seed in (7, 2**63 - 1, None):
            status, _ = await served.post("/v1/chat/completions", {"messages": [ASK], "n": 2, "seed": seed})
            assert status == 200
        seeds = [sampling.seed for _, sampling, _ in served.engine.calls]
        assert sorted(seeds[:2]) == [7, 8]
        assert sorted(seeds[2:4]) == [-(2**63), 2**63 - 1]
        assert seeds[4:] == [None, None]

    play(work, overrules=False)


ODD = st.none() | st.just("") | st.just("x") | st.just(1) | st.just(True) | st.just([]) | st.just({})
TEXT = st.just("x") | ODD
ODD_FUNCTION = st.fixed_dictionaries({"name": TEXT, "arguments": TEXT}, optional={"strict": ODD})
ODD_CALL = st.fixed_dictionaries({"id": TEXT, "type": st.just("function") | ODD, "function": ODD_FUNCTION | ODD})
ODD_CALLS = st.lists(ODD_CALL | ODD, min_size=1, max_size=2) | ODD
ROLES = st.sampled_from(["system", "developer", "user", "assistant", "tool", "", None, 1, ["user"]])
ODD_MESSAGES = st.fixed_dictionaries(
    {"role": ROLES, "content": TEXT},
    optional={"tool_calls": ODD_CALLS, "tool_call_id": TEXT, "refusal": ODD, "name": ODD, "more": ODD},
)


@given(ODD_MESSAGES)
def test_what_histories_mostly_hold_is_read_as_field_by_field(message: dict[str, Any]) -> None:
    try:
        read: Any = _by_fields(message, "messages[0]")
    except ApiError:
        read = None
    assert _as_usual(message) in (None, read)


CALLED = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@table(
    "message",
    [
        {"role": "user", "content": "a"},
        {"role": "tool", "tool_call_id": "c", "content": ""},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": [CALLED]},
        {"role": "assistant", "content": "a", "tool_calls": [CALLED, CALLED]},
        {"role": "assistant", "content": "a", "refusal": None},
    ],
)
def test_it_is_not_asked_for_each_field(message: dict[str, Any]) -> None:
    assert _as_usual(message) == _by_fields(message, "messages[0]") is not None
