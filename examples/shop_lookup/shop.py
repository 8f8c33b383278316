"""Look up numbers with an AgentScope agent and a tool, and judge its answers."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from astuner import Judge, JudgeOutput, ModelTuner, Workflow, WorkflowOutput, WorkflowTask
from astuner_agentscope import make_tool_agent

SYSTEM_PROMPT = "You are the clerk of a shop. Look up the number that is asked for, then say it."
PROPERTIES = ("price", "stock", "weight")


def answer(number: str) -> str:
    """Return the clerk's answer."""
    return f"It is {number}."


def make_tool(shelves: Mapping[str, Mapping[str, int]]) -> Callable[[str, str], str]:
    """Return the clerk's tool, which reads ``shelves``: thing -> property -> number."""

    def look_up(thing: str, what: str) -> str:
        """Look up a number of a thing in the shop.

        Args:
            thing (str): The thing.
            what (str): price, stock or weight.
        """
        number = shelves.get(thing, {}).get(what)
        return f"there is no {what} of {thing}" if number is None else str(number)

    return look_up


class Clerk(Workflow):
    """Workflow of one episode: question, tool call, answer."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        task = workflow_task.task
        look_up = make_tool({task.metadata["thing"]: task.metadata["shelf"]})
        agent = make_tool_agent(model_tuner, name="clerk", system_prompt=SYSTEM_PROMPT, tools=[look_up], max_iters=2)
        return WorkflowOutput(metadata={"final_answer": await agent.reply(task.main_query)})


class RightNumber(Judge):
    """Judge: 1 if the requested number is the only number in the answer, else 0."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)

    def judge(self, workflow_task: WorkflowTask, output: WorkflowOutput) -> JudgeOutput:
        row = workflow_task.task.metadata
        said = re.findall(r"\d+", output.metadata.get("final_answer", output.response))
        return JudgeOutput(reward=float(said == [str(row["shelf"][row["asked"]])]))
