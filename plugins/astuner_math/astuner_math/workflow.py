"""The Quick Start's math agent: one AgentScope agent, at most one tool, an answer in a box.

The agent is AgentScope's own, 1.x or 2.x. To train it, the workflow passes ``model_tuner`` as its model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from astuner import Workflow, WorkflowOutput, WorkflowTask
from astuner.contracts.section import Section
from astuner_math.calculator import CalculatorError, calculate

if TYPE_CHECKING:
    from astuner import ModelTuner
    from astuner_sandbox import SandboxFailed

_TASK = """You are an agent specialized in solving math problems{with_tools}.
Please solve the math problem given to you.
"""
_BOX = "You should return your final answer within \\boxed{}."
_PROMPTS = {
    "python": _TASK.format(with_tools=" with tools")
    + "You can write and execute Python code to perform calculation or verify your answer.\n"
    + _BOX,
    "calculator": _TASK.format(with_tools=" with tools") + "Use the calculator for every calculation.\n" + _BOX,
    "none": _TASK.format(with_tools="") + _BOX,
}


class MathAgentConfig(Section):
    tool: Literal["python", "calculator", "none"] = "python"
    """`python` runs the code that the model writes in a sandbox: a process of its own without network, without your
    files, and with little it may use up. `calculator` is plain arithmetic."""
    max_iters: int = Field(default=2, ge=1)
    """Rounds of reasoning and tool calls; after the last one the agent is asked to answer without tools."""
    system_prompt: str | None = None
    """Replaces the prompt that goes with the tool; ask for `\\boxed{}` in it, the judge reads nothing else."""


class MathAgentWorkflow(Workflow):
    """Ask the agent, hand its reply to the judge as ``metadata["final_answer"]``."""

    name = "math_agent"

    def __init__(self, config: MathAgentConfig | None = None) -> None:
        self.config = config or MathAgentConfig()

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        from astuner_agentscope import make_tool_agent

        broken: list[SandboxFailed] = []
        agent = make_tool_agent(
            model_tuner,
            name="math_react_agent",
            system_prompt=self.config.system_prompt or _PROMPTS[self.config.tool],
            tools=_tools(self.config.tool, broken.append),
            max_iters=self.config.max_iters,
        )
        answer = await agent.reply(workflow_task.task.main_query)
        if broken:  # AgentScope turned it into an observation, which no sandbox gave
            raise broken[0]
        return WorkflowOutput(response=answer, metadata={"final_answer": answer})


def _tools(tool: str, on_failure: Callable[[SandboxFailed], object]) -> Sequence[Callable[..., Any]]:
    if tool == "python":
        from astuner_sandbox import python_tool

        return [python_tool(on_failure=on_failure)]
    return [calculator] if tool == "calculator" else []


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression (str): The expression, e.g. (12 + 3) * 4.
    """
    try:
        return str(calculate(str(expression)))  # a model may send anything as an argument
    except CalculatorError as e:
        return f"Error: {e}"
