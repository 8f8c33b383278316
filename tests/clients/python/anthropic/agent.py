import sys

from anthropic import Anthropic
from tool import SYSTEM, calculator

SCHEMA = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
TOOL = {"name": "calculator", "description": "Evaluate an arithmetic expression.", "input_schema": SCHEMA}

client = Anthropic()
messages = [{"role": "user", "content": sys.stdin.read()}]
while True:
    answer = client.messages.create(model="astuner", max_tokens=1000, system=SYSTEM, messages=messages, tools=[TOOL])
    messages.append({"role": "assistant", "content": answer.content})
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": calculator(**block.input)}
        for block in answer.content
        if block.type == "tool_use"
    ]
    if not results:
        break
    messages.append({"role": "user", "content": results})
print(answer.content[-1].text)
