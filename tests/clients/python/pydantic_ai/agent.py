import sys

from pydantic_ai import Agent
from tool import SYSTEM, calculator

agent = Agent("openai-chat:astuner", system_prompt=SYSTEM, tools=[calculator])
print(agent.run_sync(sys.stdin.read()).output)
