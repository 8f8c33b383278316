"""A clerk: an AgentScope ReActAgent that looks a number up with a tool, then says it; and the judge of its answers."""

import re
from collections.abc import Mapping
from typing import Any

from agentscope.agent import ReActAgent
from agentscope.formatter import DashScopeChatFormatter
from agentscope.memory import InMemoryMemory
from agentscope.message import Msg, TextBlock
from agentscope.tool import Toolkit, ToolResponse

from astuner import Judge, JudgeOutput, ModelTuner, Workflow, WorkflowOutput, WorkflowTask

SYSTEM_PROMPT = "You are the clerk of a shop. Look up the number that is asked for, then say it."
PROPERTIES = ("price", "stock", "weight")


def answer(number: str) -> str:
    """How the clerk says what the tool found."""
    return f"It is {number}."


def toolkit(shelves: Mapping[str, Mapping[str, int]]) -> Toolkit:
    """The clerk's one tool, which reads ``shelves``: thing -> property -> number."""

    def look_up(thing: str, what: str) -> ToolResponse:
        """Look up a number of a thing in the shop.

        Args:
            thing (str): The thing.
            what (str): price, stock or weight.
        """
        number = shelves.get(thing, {}).get(what)
        text = f"there is no {what} of {thing}" if number is None else str(number)
        return ToolResponse(content=[TextBlock(type="text", text=text)])

    made = Toolkit()
    made.register_tool_function(look_up)
    return made


class Clerk(Workflow):
    """One episode: a question, the tool, an answer."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        task = workflow_task.task
        agent = ReActAgent(
            name="clerk",
            sys_prompt=SYSTEM_PROMPT,
            model=model_tuner,
            formatter=DashScopeChatFormatter(),
            toolkit=toolkit({task.metadata["thing"]: task.metadata["shelf"]}),
            memory=InMemoryMemory(),
            max_iters=2,
        )
        agent.set_console_output_enabled(False)
        result = await agent.reply(Msg("user", task.main_query, role="user"))
        return WorkflowOutput(metadata={"final_answer": result.get_text_content() or ""})


class RightNumber(Judge):
    """1 where the only number in the answer is the one that was asked for, else 0."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)

    def judge(self, workflow_task: WorkflowTask, output: WorkflowOutput) -> JudgeOutput:
        row = workflow_task.task.metadata
        said = re.findall(r"\d+", output.metadata.get("final_answer", output.response))
        return JudgeOutput(reward=float(said == [str(row["shelf"][row["asked"]])]))
