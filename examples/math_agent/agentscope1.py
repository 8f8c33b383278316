"""The math agent of `workflow.py` for AgentScope 1.x, whose agent is `ReActAgent`."""

from agentscope.agent import ReActAgent
from agentscope.formatter import DashScopeChatFormatter
from agentscope.memory import InMemoryMemory
from agentscope.message import Msg, TextBlock
from agentscope.tool import Toolkit, ToolResponse

from astuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask
from astuner_math.calculator import CalculatorError, calculate

SYSTEM_PROMPT = "You solve math problems with a calculator. Answer with \\boxed{}."


def calculator(expression: str) -> ToolResponse:
    """Evaluate an arithmetic expression.

    Args:
        expression (str): Numbers, + - * / and parentheses.
    """
    try:
        text = str(round(calculate(expression), 4))  # evaluates arithmetic only, never code
    except CalculatorError as error:
        text = f"error: {error}"
    return ToolResponse(content=[TextBlock(type="text", text=text)])


class MathAgentWorkflow(Workflow):
    """Run one episode: ask the agent and pass its answer to the judge."""

    name = "math_agent_workflow"

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        toolkit = Toolkit()  # not shared between episodes: in 1.0.7, each agent registers a tool of its own in it
        toolkit.register_tool_function(calculator)
        agent = ReActAgent(
            name="math_react_agent",
            sys_prompt=SYSTEM_PROMPT,
            model=model_tuner,  # this makes the agent trainable
            formatter=DashScopeChatFormatter(),
            toolkit=toolkit,
            memory=InMemoryMemory(),
            max_iters=3,
        )
        agent.set_console_output_enabled(False)
        # reply(), not agent(...), which catches the cancellation of an episode and returns a message instead
        result = await agent.reply(Msg("user", workflow_task.task.main_query, role="user"))
        return WorkflowOutput(metadata={"final_answer": result.get_text_content() or ""})
