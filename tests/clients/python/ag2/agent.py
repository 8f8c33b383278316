import asyncio
import sys

from ag2 import Agent, tool
from ag2.config import OpenAIConfig
from tool import SYSTEM, calculator

agent = Agent("math", prompt=SYSTEM, config=OpenAIConfig(model="astuner"), tools=[tool(calculator)])


async def main() -> None:
    reply = await agent.ask(sys.stdin.read())
    print(reply.body)


asyncio.run(main())
