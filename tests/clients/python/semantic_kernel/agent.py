import asyncio
import sys

from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.functions import kernel_function
from tool import SYSTEM, calculator


class Math:
    @kernel_function(name="calculator", description="Evaluate an arithmetic expression.")
    def calculator(self, expression: str) -> str:
        return calculator(expression)


async def main() -> None:
    service = OpenAIChatCompletion(ai_model_id="astuner")
    agent = ChatCompletionAgent(service=service, name="math", instructions=SYSTEM, plugins=[Math()])
    print(await agent.get_response(messages=sys.stdin.read()))


asyncio.run(main())
