import sys

import dspy
from tool import SYSTEM, calculator

dspy.configure(lm=dspy.LM("openai/astuner", cache=False))
agent = dspy.ReAct(dspy.Signature("question -> answer", SYSTEM), tools=[calculator])
print(agent(question=sys.stdin.read()).answer)
