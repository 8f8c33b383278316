"""A math agent: an AgentScope ReActAgent that solves word problems with a calculator."""

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
        text = str(round(calculate(expression), 4))  # reads arithmetic only: nothing the model writes is run as code
    except CalculatorError as error:
        text = f"error: {error}"
    return ToolResponse(content=[TextBlock(type="text", text=text)])


# Made once, because reading a tool's signature and docstring takes as long as the rest of an episode.  All episodes
# may share it: the calculator remembers nothing.  A tool that does (files, a game) belongs into `execute`.
toolkit = Toolkit()
toolkit.register_tool_function(calculator)


class MathAgentWorkflow(Workflow):
    """One episode: ask the agent, hand its answer to the judge."""

    name = "math_agent_workflow"

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
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
        # reply(), not agent(...): the latter turns a cancelled episode into a polite answer
        result = await agent.reply(Msg("user", workflow_task.task.main_query, role="user"))
        return WorkflowOutput(metadata={"final_answer": result.get_text_content() or ""})
