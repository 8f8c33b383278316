import json
import re
import sys

from openai import OpenAI
from tool import SYSTEM, calculator

FORMAT = """
You may use the tool calculator(expression: str). Write:
Thought: what you think
Action: calculator
Action Input: {"expression": "2 * 3"}
and you are told "Observation: …". At the end write:
Answer: the answer"""

client = OpenAI()
messages = [{"role": "system", "content": SYSTEM + FORMAT}, {"role": "user", "content": sys.stdin.read()}]
while True:
    answer = client.chat.completions.create(model="astuner", messages=messages, stop=["\nObservation:"])
    text = answer.choices[0].message.content
    messages.append({"role": "assistant", "content": text})
    if not (call := re.search(r"Action: calculator\nAction Input:(.*)", text)):
        break
    messages.append({"role": "user", "content": f"Observation: {calculator(**json.loads(call[1]))}"})
print(text.partition("Answer:")[2])
