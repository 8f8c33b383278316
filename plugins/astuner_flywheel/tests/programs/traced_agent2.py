"""An AgentScope 2.x agent with a tool, traced as its users trace it: MODEL_URL TRACES_URL QUESTION..."""

import asyncio
import sys

from agentscope.agent import Agent
from agentscope.credential import OpenAICredential
from agentscope.message import UserMsg
from agentscope.middleware import TracingMiddleware
from agentscope.model import OpenAIChatModel
from agentscope.permission import PermissionBehavior, PermissionDecision
from agentscope.tool import FunctionTool, Toolkit
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

ALLOWED = PermissionDecision(behavior=PermissionBehavior.ALLOW, message="")


def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a (int): One number.
        b (int): The other one.
    """
    return str(a + b)


async def main(base_url: str, tracing_url: str, *questions: str) -> None:
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=tracing_url)))
    trace.set_tracer_provider(provider)
    agent = Agent(  # with its clock, as most users have it
        name="helper",
        system_prompt="You add numbers.",
        model=OpenAIChatModel(OpenAICredential(api_key="k", base_url=base_url), "scripted", stream=False),
        toolkit=Toolkit(tools=[FunctionTool(add, permission=ALLOWED)]),
        middlewares=[TracingMiddleware()],
    )
    for question in questions:
        await agent.reply(UserMsg("user", question))
    provider.force_flush()


asyncio.run(main(*sys.argv[1:]))
