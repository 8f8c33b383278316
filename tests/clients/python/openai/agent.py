import json
import sys

from openai import OpenAI
from tool import SYSTEM, calculator

PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
TOOL = {"name": "calculator", "description": "Evaluate an arithmetic expression.", "parameters": PARAMETERS}

client = OpenAI()
messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": sys.stdin.read()}]
while True:
    answer = client.chat.completions.create(
        model="astuner", messages=messages, tools=[{"type": "function", "function": TOOL}]
    )
    message = answer.choices[0].message
    messages.append(message)
    for call in message.tool_calls or []:
        result = calculator(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    if not message.tool_calls:
        break
print(message.content)
