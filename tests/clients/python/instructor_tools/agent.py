import sys
from typing import Literal

import instructor
from pydantic import BaseModel
from tool import SYSTEM, calculator


class Step(BaseModel):
    """Use the calculator, or answer."""

    action: Literal["calculator", "answer"]
    text: str


client = instructor.from_provider("openai/astuner", mode=instructor.Mode.TOOLS)
messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": sys.stdin.read()}]
while True:
    step, completion = client.create_with_completion(response_model=Step, messages=messages)
    if step.action == "answer":
        break
    message = completion.choices[0].message
    messages.append(message.model_dump())
    messages += [
        {"role": "tool", "tool_call_id": call.id, "content": calculator(step.text)} for call in message.tool_calls
    ]
print(step.text)
