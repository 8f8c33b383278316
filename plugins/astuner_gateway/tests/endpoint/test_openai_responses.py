"""The Responses API, as OpenAI's own client sees it."""

from __future__ import annotations

import gc
import json
import weakref
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from astuner.contracts.types import Split
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


@table("stream", [False, True])
def test_an_agent_may_refer_to_what_it_was_told(play: Any, stream: bool) -> None:
    """As the AI SDK does by default: every item of an answer comes back as a reference."""

    async def work(served: Any) -> None:
        history: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "What?"}]}]
        async with client(served) as model:
            for _ in range(3):
                done = await ask(model, stream, input=history, tools=[TOOL])
                history += [{"type": "item_reference", "id": item.id} for item in done.output]
                for item in done.output:
                    if item.type == "function_call":
                        output = {"type": "function_call_output", "call_id": item.call_id, "output": "4"}
                        history.append(output)
        assert done.output_text == "four"
        assert [t.continues for t in served.recorder.turns] == [None, 0, 1]

    play(work, ["Both.\n" + CALL + "\n" + CALL, CALL, "four"], split=Split.TRAIN)


def test_an_answer_goes_on_from_a_response_by_its_id(play: Any, thinking: Any) -> None:
    async def work(served: Any) -> None:
        async with client(served) as model:
            first = await ask(model, False, input="What?", instructions="Be brief.")
            second = await ask(model, True, input="Again.", instructions="Be brief.", previous_response_id=first.id)
            other = await ask(model, False, input="Else.", instructions="Be brief.", previous_response_id=first.id)
            third = await ask(model, False, input="More.", instructions="Be brief.", previous_response_id=second.id)
        assert (first.previous_response_id, third.previous_response_id) == (None, second.id)
        assert other.id not in (first.id, second.id)
        turns = served.recorder.turns
        assert [t.continues for t in turns] == [None, 0, 0, 1]
        assert [m["content"] for m in turns[3].request] == ["More."]

    play(work, lambda prompt: "<think>\n2 and 2\n</think>\n\nfour", codec=thinking)


def test_nothing_else_can_be_referred_to(play: Any) -> None:
    route = "/v1/responses"

    async def work(served: Any) -> None:
        _, told = await served.post(route, {"input": "What?"})
        _, unstored = await served.post(route, {"input": "What?", "store": False})
        assert (told["store"], unstored["store"]) == (True, False)
        reference = {"type": "item_reference", "id": told["output"][0]["id"]}
        refused: list[tuple[dict[str, Any], str, str]] = [
            ({"previous_response_id": unstored["id"]}, "previous_response_id", "previous_response_not_found"),
            ({"previous_response_id": "resp_other:0"}, "previous_response_id", "previous_response_not_found"),
            ({"input": [reference, {**reference, "id": unstored["output"][0]["id"]}]}, "input[1].id", "not_found"),
            ({"input": [reference, reference]}, "input[1].id", "duplicate_item"),
        ]
        for extra, param, code in refused:
            status, body = await served.post(route, {"input": "Go on.", **extra})
            assert (status, body["error"]["param"], body["error"]["code"]) == (400, param, code)
        other = served.endpoint.issue(served.tuner, "other")
        headers = {"Authorization": f"Bearer {other.api_key}"}
        status, body = await served.post(route, {"input": [reference]}, **headers)
        assert (status, body["error"]["code"]) == (400, "not_found")  # another agent's
        assert len(served.recorder.turns) == 2

    play(work)


def test_what_was_told_is_bounded_and_goes_with_the_episode(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("astuner_gateway.endpoint.openai_responses.KEPT_BYTES", 3000)
    kept: list[weakref.ref[Any]] = []

    async def work(served: Any) -> None:
        ids, items = [], []
        for _ in range(5):
            _, told = await served.post("/v1/responses", {"input": "x" * 1000})
            ids.append(told["id"])
            items.append(told["output"][0]["id"])
        (holder,) = served.endpoint._keys._passes.values()
        kept.append(weakref.ref(holder.told))
        statuses = [(await served.post("/v1/responses", {"input": "y", "previous_response_id": one}))[0] for one in ids]
        assert statuses == [400, 400, 400, 200, 200]
        everything = [{"type": "item_reference", "id": one} for one in items]
        assert (await served.post("/v1/responses", {"input": [*everything, {"role": "user", "content": "z"}]}))[
            0
        ] == 200

    play(work)
    gc.collect()
    assert kept[0]() is None


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
