import os
import sys

from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import tool
from tool import SYSTEM, calculator

agent = Agent(
    chat_generator=OpenAIChatGenerator(model="astuner", api_base_url=os.environ["OPENAI_BASE_URL"]),
    system_prompt=SYSTEM,
    tools=[tool(calculator)],
)
print(agent.run(messages=[ChatMessage.from_user(sys.stdin.read())])["last_message"].text)
