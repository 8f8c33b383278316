"""Look up numbers with an AgentScope agent and a tool, and judge its answers."""

import re
from collections.abc import Mapping
from typing import Any

from agentscope.agent import Agent, InjectionConfig, ReActConfig
from agentscope.message import UserMsg
from agentscope.permission import PermissionBehavior, PermissionDecision
from agentscope.tool import FunctionTool, Toolkit

from astuner import Judge, JudgeOutput, ModelTuner, Workflow, WorkflowOutput, WorkflowTask

SYSTEM_PROMPT = "You are the clerk of a shop. Look up the number that is asked for, then say it."
ALLOW = PermissionDecision(behavior=PermissionBehavior.ALLOW, message="")  # without it, AgentScope asks for permission
NO_CLOCK = InjectionConfig(inject_runtime_state=False)  # without it, the prompt contains the time
PROPERTIES = ("price", "stock", "weight")


def answer(number: str) -> str:
    """Return the clerk's answer."""
    return f"It is {number}."


def toolkit(shelves: Mapping[str, Mapping[str, int]]) -> Toolkit:
    """Return the clerk's toolkit, whose only tool reads ``shelves``: thing -> property -> number."""

    def look_up(thing: str, what: str) -> str:
        """Look up a number of a thing in the shop.

        Args:
            thing (str): The thing.
            what (str): price, stock or weight.
        """
        number = shelves.get(thing, {}).get(what)
        return f"there is no {what} of {thing}" if number is None else str(number)

    return Toolkit(tools=[FunctionTool(look_up, permission=ALLOW)])


class Clerk(Workflow):
    """Workflow of one episode: question, tool call, answer."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        task = workflow_task.task
        agent = Agent(
            name="clerk",
            system_prompt=SYSTEM_PROMPT,
            model=model_tuner,
            toolkit=toolkit({task.metadata["thing"]: task.metadata["shelf"]}),
            react_config=ReActConfig(max_iters=2),
            injection_config=NO_CLOCK,
        )
        reply = await agent.reply(UserMsg("user", task.main_query))
        return WorkflowOutput(metadata={"final_answer": reply.get_text_content() or ""})


class RightNumber(Judge):
    """Judge: 1 if the requested number is the only number in the answer, else 0."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)

    def judge(self, workflow_task: WorkflowTask, output: WorkflowOutput) -> JudgeOutput:
        row = workflow_task.task.metadata
        said = re.findall(r"\d+", output.metadata.get("final_answer", output.response))
        return JudgeOutput(reward=float(said == [str(row["shelf"][row["asked"]])]))
