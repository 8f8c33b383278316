import os
import sys
from contextlib import redirect_stdout

from smolagents import OpenAIServerModel, ToolCallingAgent, tool
from tool import SYSTEM, calculator

model = OpenAIServerModel("astuner", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
with redirect_stdout(sys.stderr):
    agent = ToolCallingAgent([tool(calculator)], model, instructions=SYSTEM)
    answer = agent.run(sys.stdin.read())
print(answer)
