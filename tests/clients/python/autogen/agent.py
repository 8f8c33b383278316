import asyncio
import sys

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient
from tool import SYSTEM, calculator


async def main() -> None:
    info = ModelInfo(vision=False, function_calling=True, json_output=True, family="unknown", structured_output=True)
    client = OpenAIChatCompletionClient(model="astuner", model_info=info)
    agent = AssistantAgent("math", client, tools=[calculator], system_message=SYSTEM, max_tool_iterations=6)
    answer = await agent.run(task=sys.stdin.read())
    print(answer.messages[-1].content)


asyncio.run(main())
