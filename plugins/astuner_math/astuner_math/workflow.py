"""Run an AgentScope agent (1.x or 2.x) on math problems, with at most one tool and a boxed answer.

To train the agent, the workflow passes ``model_tuner`` as its model.
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
    """Settings of the workflow `math_agent`."""

    tool: Literal["python", "calculator", "none"] = "python"
    """`python` runs code from the model in a sandbox: a separate process without network or access to your files, and
    with limited resources. `calculator` evaluates plain arithmetic."""
    max_iters: int = Field(default=2, ge=1)
    """Maximum rounds of reasoning and tool calls; after the last one, the agent must answer without tools."""
    system_prompt: str | None = None
    """Replacement for the default prompt of the tool. It must ask for `\\boxed{}`: the judge reads only that."""


class MathAgentWorkflow(Workflow):
    """Workflow that passes the agent's reply to the judge as ``metadata["final_answer"]``."""

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
        if broken:  # AgentScope has turned the failure into an observation
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
        return str(calculate(str(expression)))  # models may send arguments of any type
    except CalculatorError as e:
        return f"Error: {e}"
