import sys
from contextlib import redirect_stdout

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from tool import SYSTEM, calculator

with redirect_stdout(sys.stderr):
    agent = Agent(
        role="mathematician",
        goal="Solve math problems with a calculator.",
        backstory=SYSTEM,
        tools=[tool(calculator)],
        llm=LLM(model="gpt-4o"),
    )
    task = Task(description="{question}", expected_output="The answer, in \\boxed{{}}.", agent=agent)
    answer = Crew(agents=[agent], tasks=[task]).kickoff(inputs={"question": sys.stdin.read()})
print(answer)
