"""A real `ReActAgent` of AgentScope 1.0.8 or a later 1.x over a scripted engine: every turn continues the one before.

`make test-agentscope-1` runs these tests. AgentScope 1.0.7, whose agents always have one more tool, and further
situations of 1.x and 2.x are in tests/frameworks/.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from packaging.version import Version
from pydantic import BaseModel

from astuner.contracts.errors import PromptTooLong, UnsupportedRequest
from astuner.contracts.types import Split
from astuner_agentscope import agentscope1
from tests.table import table

from ._bench import Bench, call

INSTALLED = Version(pytest.importorskip("agentscope", reason="needs AgentScope 1.x").__version__)
if not Version("1.0.8") <= INSTALLED < Version("2"):
    pytest.skip(f"needs AgentScope 1.0.8 to 1.x, not {INSTALLED}", allow_module_level=True)

THINKS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class Answer(BaseModel):
    result: int


class AgentBench(Bench):
    """An episode that makes a `ReActAgent`."""

    def agent(
        self, *, formatter: str = "DashScopeChatFormatter", tools: bool = True, model: Any = None, **options: Any
    ) -> Any:
        import agentscope.formatter
        from agentscope.agent import ReActAgent
        from agentscope.tool import Toolkit

        toolkit = Toolkit()
        if tools:
            toolkit.register_tool_function(multiply)
        agent = ReActAgent(
            name="Friday",
            sys_prompt="Be brief.",
            model=model or self.tuner,
            formatter=getattr(agentscope.formatter, formatter)(),
            toolkit=toolkit,
            **options,
        )
        agent.set_console_output_enabled(False)
        return agent


async def multiply(a: int, b: int) -> Any:
    """Multiply two numbers.

    Args:
        a (int): one
        b (int): the other
    """
    from agentscope.message import TextBlock
    from agentscope.tool import ToolResponse

    return ToolResponse(content=[TextBlock(type="text", text=str(a * b))])


def say(text: str) -> Any:
    from agentscope.message import Msg

    return Msg("user", text, role="user")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("as")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


@pytest.mark.parametrize("formatter", ["DashScopeChatFormatter", "OpenAIChatFormatter"])
@pytest.mark.parametrize("parallel", [False, True])
def test_every_turn_of_a_react_loop_continues_the_one_before(formatter: str, parallel: bool) -> None:
    bench = AgentBench(
        "Let me compute.\n" + call('{"a":6,"b":7}'),
        call() + "\n" + call('{ "b": 2, "a":\t3 }'),
        call('{"a": 1, "b": "\\u4f60"}'),
        call(name="unknown"),
        "<tool_call>{broken</tool_call> and so the answer is 42.",
    )
    agent = bench.agent(formatter=formatter, parallel_tool_calls=parallel)
    reply = asyncio.run(agent.reply(say("6 times 7?")))
    assert reply.get_text_content() == "<tool_call>{broken</tool_call> and so the answer is 42."
    assert bench.continued == [None, 0, 1, 2, 3]
    assert bench.reasons == [""] * 5
    prompt = bench.tokenizer.decode(bench.recorder.turns[2].generation.prompt_ids)
    assert '{ "b": 2, "a":\t3 }' in prompt
    assert "<tool_response>\n42\n</tool_response>\n<tool_response>\n6\n</tool_response><|im_end|>" in prompt


def test_later_questions_continue_the_same_sample() -> None:
    bench = AgentBench("  four \n", call('{"a": 2, "b": 2}'), "four again")
    agent = bench.agent()

    async def work() -> None:
        await agent.reply(say("2 + 2?"))
        await agent.reply(say("and 2 * 2?"))

    asyncio.run(work())
    assert bench.continued == [None, 0, 1]


def test_a_message_leads_back_to_its_turn() -> None:
    bench = AgentBench(call(), "42")
    reply = asyncio.run(bench.agent().reply(say("6 times 7?")))
    response = asyncio.run(AgentBench("four").tuner([{"role": "user", "content": "2 + 2?"}]))
    assert reply.invocation_id == f"episode:{bench.recorder.turns[-1].index}"
    assert response.id == "episode:0"
    assert (response.usage.input_tokens, response.usage.output_tokens) == (len("[user\n2 + 2?]\n[assistant\n"), 5)


def test_reasoning_is_a_block_and_stays_in_the_prompt_though_the_formatter_drops_it() -> None:
    bench = AgentBench("<think>\nhm\n</think>\n\nfour", "<think>\nwell\n</think>\n\nfive", chat_template=THINKS)
    agent = bench.agent(tools=False)

    async def work() -> Any:
        first = await agent.reply(say("2 + 2?"))
        await agent.reply(say("2 + 3?"))
        return first

    blocks = asyncio.run(work()).content
    assert blocks == [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "four"}]
    assert bench.continued == [None, 0]


def test_an_agent_out_of_rounds_asks_without_tools_which_is_a_branch() -> None:
    bench = AgentBench(call(), "It is 42.")
    reply = asyncio.run(bench.agent(max_iters=1).reply(say("6 times 7?")))
    assert reply.get_text_content() == "It is 42."
    assert (bench.continued, bench.reasons) == ([None, None], ["", "tools_changed"])


def test_a_structured_reply_continues_and_the_tool_it_adds_is_gone_in_the_next_one() -> None:
    bench = AgentBench(call(), call('{"result": 42}', "generate_response"), "It is 42.", "You are welcome.")
    agent = bench.agent()

    async def work() -> Any:
        reply = await agent.reply(say("6 times 7?"), structured_model=Answer)
        await agent.reply(say("Thank you."))
        return reply

    assert asyncio.run(work()).metadata["result"] == 42
    assert bench.continued == [None, 0, 1, None]
    assert bench.reasons[3] == "tools_changed"


@table(
    ("said", "output", "blocks"),
    [
        (call('{"result": 42}', "generate_structured_output"), {"result": 42}, [("text", '{"result": 42}')]),
        (call('{"result": "many"}', "generate_structured_output"), None, [("text", '{"result": "many"}')]),
        (call('{"result": 42}', "other"), None, [("name", "other")]),
        ("42", None, [("text", "42")]),
    ],
)
def test_a_structured_model_fills_the_metadata_only_with_what_is_valid(
    said: str, output: Any, blocks: list[tuple[str, str]]
) -> None:
    bench = AgentBench(said)
    response = asyncio.run(bench.tuner([{"role": "user", "content": "?"}], structured_model=Answer))
    assert response.metadata == output
    assert [block[key] for block, (key, _) in zip(response.content, blocks, strict=True)] == [b for _, b in blocks]
    assert "generate_structured_output" in str(bench.recorder.turns[0].tools)


def test_keywords_that_change_sampling_are_honoured_or_refused_by_name() -> None:
    bench = AgentBench("four", "four")
    ask = [{"role": "user", "content": "2 + 2?"}]
    response = asyncio.run(bench.tuner(ask, temperature=0.2, max_tokens=3, top_p=0.5, seed=7, stop=["u"], n=None))
    sampling = bench.engine.calls[0][1]
    assert (sampling.temperature, sampling.max_tokens, sampling.top_p, sampling.seed) == (0.2, 3, 0.5, 7)
    assert [block["text"] for block in response.content] == ["fo"]
    with pytest.raises(
        UnsupportedRequest, match=r"n, presence_penalty \(only max_tokens, seed, stop, temperature, top_p"
    ):
        asyncio.run(bench.tuner(ask, n=2, presence_penalty=1.0))
    assert len(bench.engine.calls) == 1


def test_what_would_spoil_the_training_is_refused_there() -> None:
    bench = AgentBench("four", split=Split.TRAIN)
    with pytest.raises(UnsupportedRequest, match=r"temperature is 0\.2"):
        asyncio.run(bench.tuner([{"role": "user", "content": "2 + 2?"}], temperature=0.2))
    assert not bench.recorder.turns


def test_tool_choice_none_reads_no_calls() -> None:
    bench = AgentBench(call())
    tools = bench.agent().toolkit.get_json_schemas()
    response = asyncio.run(bench.tuner([{"role": "user", "content": "?"}], tools=tools, tool_choice="none"))
    assert list(response.content) == [{"type": "text", "text": call()}]


def test_a_prompt_that_is_too_long_passes_through_the_agent() -> None:
    bench = AgentBench("four", max_model_len=20)
    with pytest.raises(PromptTooLong):
        asyncio.run(bench.agent().reply(say("2 + 2?")))


def test_agents_of_one_episode_are_told_apart_by_name() -> None:
    from agentscope.model import ChatModelBase

    bench = AgentBench("I am the wolf.", "I am a villager.", call(), "done")
    wolf, villager = (bench.tuner.as_agentscope_model(agent_name=name) for name in ("wolf", "villager"))
    assert isinstance(wolf, ChatModelBase)
    assert (wolf.stream, wolf.model_name) == (False, "astuner")

    async def work() -> None:
        for model in (wolf, villager):
            await bench.agent(tools=False, model=model).reply(say("Who are you?"))
        await bench.agent(model=wolf).reply(say("6 times 7?"))

    asyncio.run(work())
    assert [t.agent for t in bench.recorder.turns] == ["wolf", "villager", "wolf", "wolf"]
    assert bench.continued == [None, None, None, 2]


def test_an_agent_is_given_its_role_with_its_model() -> None:
    bench = AgentBench("howl", "four", agents={"wolf": {}, "villager": {"train": False}})
    model = bench.tuner.as_agentscope_model(agent_name="Fenris", role="wolf")
    assert (model.agent_name, model.role) == ("Fenris", "wolf")
    asyncio.run(bench.agent(tools=False, model=model).reply(say("Who are you?")))
    assert [(t.agent, t.role, t.trained) for t in bench.recorder.turns] == [("Fenris", "wolf", True)]
    with pytest.raises(UnsupportedRequest, match="no entry for the agent 'default'"):
        asyncio.run(bench.agent(tools=False).reply(say("Who are you?")))


def test_a_stream_is_the_whole_answer_in_one_piece() -> None:
    bench = AgentBench(call(), "42")
    bench.tuner.stream = True
    assert asyncio.run(bench.agent().reply(say("6 times 7?"))).get_text_content() == "42"
    assert bench.continued == [None, 0]

    async def chunks(model: Any) -> list[Any]:
        return [chunk.content async for chunk in await model([{"role": "user", "content": "2 + 2?"}])]

    named = AgentBench("four").tuner.as_agentscope_model("solver")
    named.stream = True
    assert asyncio.run(chunks(named)) == [[{"type": "text", "text": "four"}]]


def test_arguments_that_are_no_object_are_passed_on_as_an_empty_one() -> None:
    block = agentscope1._call_block("call_0_0", {"name": "multiply", "arguments": '{"a": NaN'})
    assert (block["input"], block["raw_input"]) == ({}, '{"a": NaN')


def test_usage_is_made_of_what_all_1x_versions_have(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class ChatUsage:  # as in 1.0.7
        input_tokens: int
        output_tokens: int
        time: float
        type: str = "chat"

    from agentscope.model import ChatResponse

    monkeypatch.setattr(agentscope1, "_response_types", lambda: (ChatResponse, ChatUsage))
    response = asyncio.run(AgentBench("four").tuner([{"role": "user", "content": "?"}]))
    assert response.usage.output_tokens == 5
    assert response.usage.time >= 0
