"""Test which agents of AgentScope 2.x share their tools."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("agentscope", minversion="2", reason="needs AgentScope 2.x")

from agentscope.credential import CredentialBase
from agentscope.formatter import OpenAIChatFormatter
from agentscope.message import TextBlock, ToolCallBlock
from agentscope.model import ChatModelBase, ChatResponse

from astuner_agentscope import make_tool_agent


class CallsOnce(ChatModelBase):
    """Calls a tool with a number, then answers."""

    def __init__(self, tool: str, number: int) -> None:
        super().__init__(CredentialBase(), "scripted", self.Parameters(), stream=False)
        self.formatter = OpenAIChatFormatter()
        call = ToolCallBlock(id="c1", name=tool, input=f'{{"number": {number}}}')
        self._replies = iter([call, TextBlock(text="Done.")])

    async def _call_api(self, *args: Any, **options: Any) -> Any:
        return ChatResponse(content=[next(self._replies)], is_last=True)


def double(number: int) -> str:
    """Double a number.

    Args:
        number (int): The number.
    """
    return str(2 * number)


def make_agent(tool: Any, number: int = 1) -> Any:
    model = CallsOnce(tool.__name__, number)
    return make_tool_agent(model, name="clerk", system_prompt="Be brief.", tools=[tool])


def results(agent: Any) -> list[str]:
    blocks = [block for message in agent.agent.state.context for block in message.content]
    return [part.text for block in blocks if block.type == "tool_result" for part in block.output]


def test_agents_share_module_level_functions_and_keep_their_conversations_apart() -> None:
    agents = [make_agent(double, number) for number in range(4)]
    assert len({id(agent.agent.toolkit) for agent in agents}) == 1

    async def ask() -> list[str]:
        return list(await asyncio.gather(*(agent.reply("?") for agent in agents)))

    assert asyncio.run(ask()) == ["Done."] * 4
    assert [results(agent) for agent in agents] == [["0"], ["2"], ["4"], ["6"]]


def test_a_tool_with_state_of_its_episode_is_not_shared() -> None:
    def make_tool(calls: list[int]) -> Any:
        def note(number: int) -> str:
            """Note a number."""
            calls.append(number)
            return "ok"

        return note

    heard: list[list[int]] = [[], []]
    agents = [make_agent(make_tool(calls), number) for number, calls in enumerate(heard)]
    for agent in agents:
        asyncio.run(agent.reply("?"))
    assert heard == [[0], [1]]
    assert agents[0].agent.toolkit is not agents[1].agent.toolkit
