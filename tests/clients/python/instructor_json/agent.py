import sys
from typing import Literal

import instructor
from pydantic import BaseModel
from tool import SYSTEM, calculator


class Step(BaseModel):
    """Use the calculator, or answer."""

    action: Literal["calculator", "answer"]
    text: str


client = instructor.from_provider("openai/astuner", mode=instructor.Mode.JSON)
messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": sys.stdin.read()}]
while True:
    step, completion = client.create_with_completion(response_model=Step, messages=messages)
    if step.action == "answer":
        break
    messages.append({"role": "assistant", "content": completion.choices[0].message.content})
    messages.append({"role": "user", "content": f"calculator: {calculator(step.text)}"})
print(step.text)
