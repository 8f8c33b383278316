import asyncio
import os
import sys

from llama_index.core.agent.workflow import ReActAgent
from llama_index.llms.openai_like import OpenAILike
from tool import SYSTEM, calculator

model = OpenAILike(
    "astuner",
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
    is_chat_model=True,
)


async def main() -> None:
    agent = ReActAgent(tools=[calculator], llm=model, system_prompt=SYSTEM)
    print(await agent.run(sys.stdin.read()))


asyncio.run(main())
