"""An AgentScope 1.x agent with a tool, traced as its users would trace it: MODEL_URL TRACES_URL QUESTION..."""

import asyncio
import sys

import agentscope
from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIChatFormatter
from agentscope.memory import InMemoryMemory
from agentscope.message import Msg
from agentscope.model import OpenAIChatModel
from agentscope.tool import Toolkit, ToolResponse
from opentelemetry import trace


def add(a: int, b: int) -> ToolResponse:
    """Add two numbers.

    Args:
        a (int): One number.
        b (int): The other one.
    """
    return ToolResponse(content=[{"type": "text", "text": str(a + b)}])


async def main(base_url: str, tracing_url: str, *questions: str) -> None:
    agentscope.init(project="flywheel", name="users", tracing_url=tracing_url, logging_level="ERROR")
    toolkit = Toolkit()
    toolkit.register_tool_function(add)
    agent = ReActAgent(
        name="helper",
        sys_prompt="You add numbers.",
        model=OpenAIChatModel("scripted", api_key="k", stream=False, client_kwargs={"base_url": base_url}),
        formatter=OpenAIChatFormatter(),
        toolkit=toolkit,
        memory=InMemoryMemory(),
    )
    agent.set_console_output_enabled(False)
    for question in questions:
        await agent(Msg("user", question, "user"))
    trace.get_tracer_provider().force_flush()


asyncio.run(main(*sys.argv[1:]))
