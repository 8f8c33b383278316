"""The Responses API, as OpenAI's own client sees it."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.table import table

TOOL: Any = {
    "type": "function",
    "name": "calc",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
    "strict": True,
}
CALL = '<tool_call>\n{"name": "calc", "arguments": {"x":1}}\n</tool_call>'


def client(served: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=served.access.base_url, api_key=served.access.api_key)


async def ask(model: openai.AsyncOpenAI, stream: bool, **options: Any) -> Any:
    if not stream:
        return await model.responses.create(model="m", **options)
    async with model.responses.stream(model="m", **options) as events:
        return await events.get_final_response()


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_has_text_usage_and_a_status(play: Any, stream: bool) -> None:
    async def work(served: Any) -> None:
        async with client(served) as model:
            done = await ask(model, stream, input="What?", instructions="Be brief.", metadata={"k": "v"})
        turn = served.recorder.turns[0]
        assert [m["role"] for m in turn.request] == ["system", "user"]
        assert (done.output_text, done.status, done.model) == ("four", "completed", "m")
        assert done.output[0].status == "completed"
        assert (done.instructions, done.metadata) == ("Be brief.", {"k": "v"})
        assert done.usage.input_tokens == len(turn.generation.prompt_ids)
        assert done.usage.output_tokens == len(turn.generation.response_ids)
        assert done.usage.output_tokens_details.reasoning_tokens == 0

    play(work)


@table("stream", [False, True])
def test_a_tool_loop_continues_the_models_own_tokens(play: Any, stream: bool) -> None:
    async def work(served: Any) -> None:
        history: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "What?"}]}]
        async with client(served) as model:
            for _ in range(3):
                done = await ask(model, stream, input=history, tools=[TOOL])
                history += [item.model_dump(exclude_none=True) for item in done.output]
                for item in done.output:
                    if item.type == "function_call":
                        assert item.arguments == '{"x":1}'
                        output = {"type": "function_call_output", "call_id": item.call_id, "output": "4"}
                        history.append(output)
        assert done.output_text == "four"
        assert [t.continues for t in served.recorder.turns] == [None, 0, 1]
        assert [[m["role"] for m in t.request] for t in served.recorder.turns[1:]] == [["tool", "tool"], ["tool"]]

    play(work, ["Both.\n" + CALL + "\n" + CALL, CALL, "four"])


def test_the_events_are_numbered_and_end_with_the_whole_answer(play: Any) -> None:
    async def work(served: Any) -> None:
        async with client(served) as model:
            stream = await model.responses.create(model="m", input="What?", tools=[TOOL], stream=True)
            events = [event async for event in stream]
        assert [e.sequence_number for e in events] == list(range(len(events)))
        assert [e.type.removeprefix("response.") for e in events] == [
            "created",
            "in_progress",
            "output_item.added",
            "content_part.added",
            "output_text.delta",
            "output_text.done",
            "content_part.done",
            "output_item.done",
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
            "completed",
        ]
        assert events[0].response.output == []
        assert events[-1].response.output == [events[7].item, events[11].item]

    play(work, ["Let me see.\n" + CALL])


@table("stream", [False, True])
def test_an_answer_that_is_cut_is_incomplete(play: Any, stream: bool) -> None:
    async def work(served: Any) -> None:
        async with client(served) as model:
            if stream:
                events = [e async for e in await model.responses.create(
                    model="m", input="What?", max_output_tokens=2, stream=True
                )]  # fmt: skip
                assert events[-1].type == "response.incomplete"
                done = events[-1].response
            else:
                done = await model.responses.create(model="m", input="What?", max_output_tokens=2)
            assert (done.output_text, done.status) == ("fo", "incomplete")
            assert done.incomplete_details.reason == "max_output_tokens"

    play(work)


class Reply(BaseModel):
    value: int


def test_a_structure_is_there_or_refused(play: Any) -> None:
    async def work(served: Any) -> None:
        async with client(served) as model:
            done = await model.responses.parse(model="m", input="What?", text_format=Reply)
            assert done.output_parsed == Reply(value=4)
            done = await model.responses.parse(model="m", input="What?", text_format=Reply)
            assert done.output_parsed is None
            part = done.output[0].content[0]
            assert part.type == "refusal"
            assert "not JSON" in part.refusal
            history: list[Any] = [{"role": "user", "content": "What?"}, done.output[0].model_dump(exclude_none=True)]
            again: Any = [*history, {"role": "user", "content": "Again."}]
            streamed = await ask(model, True, input=again, text_format=Reply)
            assert streamed.output_parsed == Reply(value=5)
        assert served.recorder.turns[2].continues == 1

    play(work, ['{"value": 4}', "four", '{"value": 5}'])


def test_logprobs_come_where_they_are_included(play: Any) -> None:
    async def work(served: Any) -> None:
        async with client(served) as model:
            done = await model.responses.create(model="m", input="What?", include=["message.output_text.logprobs"])
            assert [p.logprob for p in done.output[0].content[0].logprobs] == [-0.5] * 5

    play(work)


def test_the_same_tool_makes_the_same_prompt_in_every_api(play: Any) -> None:
    function = {name: TOOL[name] for name in ("name", "description", "parameters", "strict")}
    anthropic = {"name": "calc", "description": "Adds.", "input_schema": TOOL["parameters"]}

    async def work(served: Any) -> None:
        ask_ = [{"role": "user", "content": "What?"}]
        bodies = {
            "/v1/chat/completions": {"messages": ask_, "tools": [{"type": "function", "function": function}]},
            "/v1/responses": {"input": "What?", "tools": [TOOL]},
            "/v1/messages": {"messages": ask_, "tools": [anthropic], "max_tokens": 9},
        }
        for route, body in bodies.items():
            assert (await served.post(route, body))[0] == 200
        assert len({t.generation.prompt_ids for t in served.recorder.turns}) == 1

    play(work)


def test_reasoning_is_an_item_that_may_come_back(play: Any, thinking: Any) -> None:
    async def work(served: Any) -> None:
        history: list[Any] = [{"role": "user", "content": "What?"}]
        async with client(served) as model:
            for stream in (False, True):
                done = await ask(model, stream, input=history)
                assert [item.type for item in done.output] == ["reasoning", "message"]
                assert done.output[0].content[0].text == "2 and 2"
                assert done.usage.output_tokens_details.reasoning_tokens == len("<think>\n2 and 2")
                history += [item.model_dump(exclude_none=True) for item in done.output]
                history.append({"role": "user", "content": "Again."})
        assert [t.continues for t in served.recorder.turns] == [None, 0]

    play(work, lambda prompt: "<think>\n2 and 2\n</think>\n\nfour", codec=thinking)


def test_items_of_one_answer_are_one_message_again() -> None:
    from astuner_gateway.endpoint.openai_responses import read

    def text(said: str) -> Any:
        return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": said}]}

    def call(i: int) -> Any:
        return {"type": "function_call", "call_id": f"c{i}", "name": "f", "arguments": "{}"}

    def thought(said: str) -> Any:
        return {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": said}]}

    def output(i: int) -> Any:
        return {"type": "function_call_output", "call_id": f"c{i}", "output": [{"type": "input_text", "text": "o"}]}

    given = [
        thought("t"),
        text("a"),
        call(1),
        call(2),
        output(1),
        output(2),
        text("b"),
        text("c"),
        thought("u"),
        call(3),
    ]
    messages = json.loads(json.dumps(read({"input": given}, "m").messages))
    assert [
        (m["role"], m["content"], m.get("reasoning_content"), [c["id"] for c in m.get("tool_calls", ())])
        for m in messages
    ] == [
        ("assistant", "a", "t", ["c1", "c2"]),
        ("tool", "o", None, []),
        ("tool", "o", None, []),
        ("assistant", "b", None, []),
        ("assistant", "c", None, []),
        ("assistant", None, "u", ["c3"]),
    ]
