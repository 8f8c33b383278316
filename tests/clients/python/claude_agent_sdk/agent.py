import asyncio
import sys

from claude_agent_sdk import ClaudeAgentOptions, ResultMessage, create_sdk_mcp_server, query, tool
from tool import SYSTEM
from tool import calculator as compute


@tool("calculator", "Evaluate an arithmetic expression.", {"expression": str})
async def calculator(arguments):
    return {"content": [{"type": "text", "text": compute(arguments["expression"])}]}


async def main() -> None:
    options = ClaudeAgentOptions(
        model="astuner",
        system_prompt=SYSTEM,
        mcp_servers={"math": create_sdk_mcp_server("math", tools=[calculator])},
        allowed_tools=["mcp__math__calculator"],
    )
    async for message in query(prompt=sys.stdin.read(), options=options):
        if isinstance(message, ResultMessage):
            print(message.result)


asyncio.run(main())
