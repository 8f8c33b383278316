"""`make_tool_agent` with the real agent of the installed AgentScope, 1.x or 2.x, and what an import error reports.

`make test-agentscope-1` runs these tests with AgentScope 1.x.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import pytest

pytest.importorskip("agentscope")

from astuner import Workflow, WorkflowOutput
from astuner.contracts.errors import MissingDependency, PromptTooLong
from astuner.testing import FakeEngine, check_workflow, workflow_task
from astuner_agentscope import agentscope1, agentscope2, face, make_tool_agent
from tests.table import table

from ._bench import Bench, call

VERSION = metadata.version("agentscope")


def multiply(a: int, b: int) -> str:
    """Multiply two numbers.

    Args:
        a (int): one
        b (int): the other
    """
    return str(a * b)


async def multiply_later(a: int, b: int) -> str:
    """Multiply two numbers."""
    await asyncio.sleep(0)
    return str(a * b)


def fail(a: int, b: int) -> str:
    """Multiply two numbers."""
    raise RuntimeError("out of paper")


def agent_of(bench: Bench, *tools: Any, **options: Any) -> Any:
    return make_tool_agent(bench.tuner, name="Friday", system_prompt="Be brief.", tools=tools, **options)


def tools_of(turn: Any) -> list[Any]:
    """The tools that the model sees, except the one by which AgentScope 1.0.7 ends a reply."""
    functions = [tool["function"] for tool in turn.tools]
    return [function for function in functions if function["name"] != "generate_response"]


def test_it_is_agentscopes_own_agent() -> None:
    agent = agent_of(Bench()).agent
    assert type(agent).__module__.startswith("agentscope.agent.")
    assert type(agent).__name__ == ("ReActAgent" if VERSION.startswith("1.") else "Agent")


def test_the_prompt_is_the_system_prompt_the_message_and_the_tools() -> None:
    bench = Bench("  42 \n")
    answer = asyncio.run(agent_of(bench, multiply).reply("6 times 7?"))
    assert answer == "  42 \n"
    (turn,) = bench.recorder.turns
    messages = [(message["role"], message["content"]) for message in turn.request]
    assert messages == [("system", "Be brief."), ("user", "6 times 7?")]  # and no clock
    (tool,) = tools_of(turn)
    assert (tool["name"], tool["description"]) == ("multiply", "Multiply two numbers.")
    parameters = tool["parameters"]
    assert sorted(parameters["required"]) == ["a", "b"]
    assert {name: field["type"] for name, field in parameters["properties"].items()} == {"a": "integer", "b": "integer"}


@table("tool", [multiply, multiply_later])
def test_a_tool_is_called_without_permission_and_its_text_reaches_the_model(tool: Any) -> None:
    bench = Bench("Let me see.\n" + call(name=tool.__name__), call('{ "b": 2, "a":\t3 }', tool.__name__), "42")
    assert asyncio.run(agent_of(bench, tool).reply("6 times 7?")) == "42"
    results = [[(m["role"], m["content"]) for m in request] for request in bench.requests[1:]]
    assert results == [[("tool", "42")], [("tool", "6")]]
    assert (bench.continued, bench.reasons) == ([None, 0, 1], [""] * 3)


@table(("reply", "text"), [(call(name="fail"), "out of paper"), (call(name="unknown"), "unknown")])
def test_errors_of_tools_reach_the_model(reply: str, text: str) -> None:
    bench = Bench(reply, "I give up.")
    assert asyncio.run(agent_of(bench, fail).reply("6 times 7?")) == "I give up."
    assert text in bench.requests[1][0]["content"]


def test_it_remembers_the_messages_before() -> None:
    bench = Bench("four", "five")
    agent = agent_of(bench)

    async def work() -> list[str]:
        return [await agent.reply("2 + 2?", sender="env"), await agent.reply("2 + 3?", sender="env")]

    assert asyncio.run(work()) == ["four", "five"]
    assert bench.continued == [None, 0]
    assert [message["content"] for message in bench.requests[1]] == ["2 + 3?"]
    assert not any(tools_of(turn) for turn in bench.recorder.turns)


@pytest.mark.skipif(VERSION == "1.0.7", reason="its agent repeats an empty reply")
def test_the_message_after_an_empty_reply_continues_the_conversation() -> None:
    bench = Bench("four", "", "five")
    agent = agent_of(bench)

    async def work() -> list[str]:
        return [await agent.reply(text) for text in ("2 + 2?", "Sure?", "2 + 3?")]

    assert asyncio.run(work()) == ["four", "", "five"]
    assert bench.continued == [None, 0, 1]


def test_after_max_iters_it_answers() -> None:
    bench = Bench(call(), "It is 42.")
    assert asyncio.run(agent_of(bench, multiply, max_iters=1).reply("6 times 7?")) == "It is 42."
    assert len(bench.recorder.turns) == 2


def test_a_prompt_that_is_too_long_passes_through() -> None:
    with pytest.raises(PromptTooLong):
        asyncio.run(agent_of(Bench("four", max_model_len=20)).reply("2 + 2?"))


class Hangs(FakeEngine):
    """Never answers the second call."""

    async def generate(self, *arguments: Any, **options: Any) -> Any:
        if self.calls:
            await asyncio.Event().wait()
        return await super().generate(*arguments, **options)


def test_a_cancelled_reply_raises_and_gives_no_polite_answer() -> None:
    bench = Bench(call(), engine_type=Hangs)
    agent = agent_of(bench, multiply)

    async def work() -> None:
        reply = asyncio.create_task(agent.reply("6 times 7?"))
        while not bench.recorder.turns:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)  # until it waits for the second answer
        reply.cancel()
        await reply

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(work())


class Multiplies(Workflow):
    async def execute(self, workflow_task: Any, model_tuner: Any) -> WorkflowOutput:
        agent = make_tool_agent(model_tuner, name="Friday", system_prompt="Be brief.", tools=[multiply])
        return WorkflowOutput(response=await agent.reply(workflow_task.task.main_query))


def test_a_workflow_with_it_shows_the_same_prompts_in_every_episode(capsys: pytest.CaptureFixture[str]) -> None:
    output = check_workflow(Multiplies, workflow_task("6 times 7?"), replies=[call(), "42"])
    assert output.response == "42"
    assert capsys.readouterr().out == ""


# ---- what is missing


@pytest.fixture
def _uncached() -> Iterator[None]:
    caches = (face.adapter, agentscope1.model_class, agentscope1._response_types, agentscope2.model_class)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.usefixtures("_uncached")
@pytest.mark.parametrize(
    ("version", "message"),
    [
        (None, r"not installed. .*pip install 'astuner-agentscope\[agentscope2\]'.*\[agentscope1\]"),
        ("0.1.6", r"supports AgentScope 2.x and 1.x, not 0.1.6"),
        ("3.0.0", r"supports AgentScope 2.x and 1.x, not 3.0.0"),
        ("1.0.21", r"1.x cannot be imported \(.*\)\. .*pip install 'astuner-agentscope\[agentscope1\]'"),
        ("2.0.10", r"2.x cannot be imported \(.*\)\. .*pip install 'astuner-agentscope\[agentscope2\]'"),
    ],
)
def test_the_error_names_what_to_install(version: str | None, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def installed(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", installed)
    monkeypatch.setitem(sys.modules, "agentscope.model", None)  # cannot be imported, as if a dependency were missing
    bench = Bench("four")
    with pytest.raises(MissingDependency, match=message):
        asyncio.run(bench.tuner([{"role": "user", "content": "?"}]))
    with pytest.raises(MissingDependency, match=message):
        agent_of(bench)


@pytest.mark.skipif(VERSION.startswith("2."), reason="needs AgentScope 1.x")
def test_the_model_class_of_2x_cannot_be_made_with_1x() -> None:
    with pytest.raises(MissingDependency, match=r"AgentScope 2.x cannot be imported"):
        agentscope2.model_class()
