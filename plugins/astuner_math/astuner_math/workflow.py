"""The Quick Start's math agent: one AgentScope `ReActAgent`, at most one tool, an answer in a box.

The agent is AgentScope's own, unchanged; training it takes no more than passing ``model_tuner`` as its model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from astuner import Workflow, WorkflowOutput, WorkflowTask
from astuner.contracts.section import Section
from astuner_math.calculator import CalculatorError, calculate

if TYPE_CHECKING:
    from agentscope.message import Msg
    from agentscope.tool import ToolResponse

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
        from agentscope.agent import ReActAgent
        from agentscope.formatter import DashScopeChatFormatter
        from agentscope.memory import InMemoryMemory
        from agentscope.message import Msg
        from agentscope.tool import Toolkit

        broken: list[SandboxFailed] = []
        toolkit = Toolkit()
        if self.config.tool == "python":
            from astuner_sandbox import python_tool

            toolkit.register_tool_function(python_tool(on_failure=broken.append))
        elif self.config.tool == "calculator":
            toolkit.register_tool_function(calculator)
        model: Any = model_tuner  # AgentScope calls it and reads `stream`; it asks for no base class
        agent = ReActAgent(
            name="math_react_agent",
            sys_prompt=self.config.system_prompt or _PROMPTS[self.config.tool],
            model=model,
            formatter=DashScopeChatFormatter(),
            toolkit=toolkit,
            memory=InMemoryMemory(),
            max_iters=self.config.max_iters,
        )
        agent.set_console_output_enabled(False)
        # reply(), not agent(...): the latter turns a cancelled episode into a polite answer
        reply = await agent.reply(Msg("user", workflow_task.task.main_query, role="user"))
        if broken:  # AgentScope made an observation of it, which no sandbox gave
            raise broken[0]
        answer = final_answer(reply)
        return WorkflowOutput(response=answer, metadata={"final_answer": answer})


def final_answer(reply: Msg) -> str:
    """The text of an AgentScope reply, whose content is a string (1.0.7) or a list of blocks (later)."""
    return reply.get_text_content() or ""


def calculator(expression: str) -> ToolResponse:
    """Evaluate an arithmetic expression.

    Args:
        expression (str): The expression, e.g. (12 + 3) * 4.
    """
    from agentscope.message import TextBlock
    from agentscope.tool import ToolResponse

    return ToolResponse(content=[TextBlock(type="text", text=_answer(expression))])


def _answer(expression: Any) -> str:
    """What the model reads: the value, or why there is none. A model may send anything as an argument."""
    try:
        return str(calculate(str(expression)))
    except CalculatorError as e:
        return f"Error: {e}"
