"""Messages, as Anthropic's own client sees them."""

from __future__ import annotations

from typing import Any

import anthropic
from pydantic import BaseModel

from tests.table import table

ASK: Any = {"role": "user", "content": "What is 2 + 2?"}
TOOL: Any = {
    "name": "calc",
    "description": "Adds.",
    "input_schema": {"type": "object", "properties": {"x": {"type": "integer"}}},
}
CALL = '<tool_call>\n{"name": "calc", "arguments": {"x": 1, "é": ["π"]}}\n</tool_call>'


def client(served: Any, **options: Any) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=served.access.anthropic_base_url, api_key=served.access.api_key, **options)


async def ask(model: anthropic.AsyncAnthropic, stream: bool, **options: Any) -> Any:
    options = {"model": "claude-opus-4-5", "max_tokens": 1000, **options}
    if not stream:
        return await model.messages.create(**options)
    async with model.messages.stream(**options) as events:
        return await events.get_final_message()


@table("stream", [False, True])
def test_an_answer_has_text_usage_and_a_stop_reason(play: Any, stream: bool) -> None:
    async def work(served: Any) -> None:
        async with client(served) as model:
            done = await ask(model, stream, system="Be brief.", messages=[ASK])
            cut = await ask(model, stream, messages=[ASK], max_tokens=2)
        turn = served.recorder.turns[0]
        assert [m["role"] for m in turn.request] == ["system", "user"]
        assert [(b.type, b.text) for b in done.content] == [("text", "four")]
        assert (done.model, done.stop_reason, done.stop_sequence) == ("claude-opus-4-5", "end_turn", None)
        assert done.usage.input_tokens == len(turn.generation.prompt_ids)
        assert done.usage.output_tokens == len(turn.generation.response_ids)
        assert (cut.content[0].text, cut.stop_reason, cut.usage.output_tokens) == ("fo", "max_tokens", 2)

    play(work)


@table("stream", [False, True])
def test_a_tool_loop_continues_the_models_own_tokens(play: Any, stream: bool) -> None:
    async def work(served: Any) -> None:
        messages: list[Any] = [ASK]
        async with client(served) as model:
            for _ in range(3):
                done = await ask(model, stream, messages=messages, tools=[TOOL], tool_choice={"type": "auto"})
                messages.append(
                    {"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in done.content]}
                )
                calls = [b for b in done.content if b.type == "tool_use"]
                assert done.stop_reason == ("tool_use" if calls else "end_turn")
                assert all(b.input == {"x": 1, "é": ["π"]} for b in calls)
                results = [{"type": "tool_result", "tool_use_id": b.id, "content": "4"} for b in calls]
                if calls:
                    messages.append({"role": "user", "content": [*results, {"type": "text", "text": "Go on."}]})
        assert done.content[0].text == "four"
        assert [t.continues for t in served.recorder.turns] == [None, 0, 1]
        assert [m["role"] for m in served.recorder.turns[1].request] == ["tool", "tool", "user"]

    play(work, ["Both.\n" + CALL + "\n" + CALL, CALL, "four"])


def test_a_stop_sequence_is_told(play: Any) -> None:
    async def work(served: Any) -> None:
        async with client(served) as model:
            for stream in (False, True):
                done = await ask(model, stream, messages=[ASK], stop_sequences=["Obs:"])
                assert (done.content[0].text, done.stop_reason, done.stop_sequence) == (
                    "think ",
                    "stop_sequence",
                    "Obs:",
                )

    play(work, lambda prompt: "think Obs: more")


def test_reasoning_is_a_thinking_block_that_may_come_back(play: Any, thinking: Any) -> None:
    async def work(served: Any) -> None:
        messages: list[Any] = [ASK]
        async with client(served) as model:
            for stream in (False, True):
                done = await ask(model, stream, messages=messages)
                assert [b.type for b in done.content] == ["thinking", "text"]
                assert done.content[0].thinking == "2 and 2"
                assert done.content[0].signature
                messages += [{"role": "assistant", "content": [b.model_dump() for b in done.content]}, ASK]
        assert [t.continues for t in served.recorder.turns] == [None, 0]

    play(work, lambda prompt: "<think>\n2 and 2\n</think>\n\nfour", codec=thinking)


class Reply(BaseModel):
    value: int


def test_a_structure_is_there_or_refused(play: Any) -> None:
    async def work(served: Any) -> None:
        async with client(served) as model:
            options: Any = {"model": "m", "max_tokens": 100, "messages": [ASK], "output_format": Reply}
            done = await model.messages.parse(**options)
            assert done.parsed_output == Reply(value=4)
            done = await model.messages.parse(**options)
            assert (done.content, done.stop_reason) == ([], "refusal")
            assert "not JSON" in done.stop_details.explanation

    play(work, ['{"value": 4}', "four"])


def test_a_tools_error_is_told_in_the_text(play: Any) -> None:
    def results(*contents: Any) -> list[Any]:
        calls = [{"type": "tool_use", "id": f"c{i}", "name": "f", "input": {}} for i in range(len(contents))]
        blocks = [
            {"type": "tool_result", "tool_use_id": f"c{i}", "content": content, "is_error": True}
            for i, content in enumerate(contents)
        ]
        return [ASK, {"role": "assistant", "content": calls}, {"role": "user", "content": blocks}]

    async def work(served: Any) -> None:
        messages = results("no such file", "ValueError: x", [{"type": "text", "text": "gone"}], None)
        status, body = await served.post("/v1/messages", {"messages": messages, "max_tokens": 5})
        assert status == 200, body
        said = [m["content"] for m in served.recorder.turns[0].request if m["role"] == "tool"]
        assert said == ["Error: no such file", "ValueError: x", "Error: gone", "Error: "]

    play(work)


def test_the_models_are_listed_for_both_clients(play: Any) -> None:
    import openai

    async def work(served: Any) -> None:
        async with client(served) as model:
            assert [m.id async for m in model.models.list()] == ["astuner"]
            assert (await model.models.retrieve("claude-opus-4-5")).type == "model"
        async with openai.AsyncOpenAI(base_url=served.access.base_url, api_key=served.access.api_key) as other:
            assert [m.id async for m in other.models.list()] == [served.access.model]
            assert (await other.models.retrieve("gpt-4o")).id == "gpt-4o"

    play(work)


def test_a_tool_runner_of_the_client_works(play: Any) -> None:
    @anthropic.beta_async_tool
    async def calc(x: int) -> str:
        """Adds.

        Args:
            x: what
        """
        return str(x + 3)

    async def work(served: Any) -> None:
        async with client(served) as model:
            runner = model.beta.messages.tool_runner(model="m", max_tokens=100, tools=[calc], messages=[ASK])
            done = await runner.until_done()
        assert done.content[0].text == "four"
        assert served.recorder.turns[1].request[0]["content"] == "4"

    play(work, ['<tool_call>\n{"name": "calc", "arguments": {"x": 1}}\n</tool_call>', "four"])
