"""A math agent: an AgentScope agent that solves word problems with a calculator."""

from agentscope.agent import Agent, InjectionConfig, ReActConfig
from agentscope.message import UserMsg
from agentscope.permission import PermissionBehavior, PermissionDecision
from agentscope.tool import FunctionTool, Toolkit

from astuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask
from astuner_math.calculator import CalculatorError, calculate

SYSTEM_PROMPT = "You solve math problems with a calculator. Answer with \\boxed{}."
ALLOW = PermissionDecision(behavior=PermissionBehavior.ALLOW, message="")  # without it, AgentScope asks for permission
NO_CLOCK = InjectionConfig(inject_runtime_state=False)  # without it, the prompt contains the time


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression (str): Numbers, + - * / and parentheses.
    """
    try:
        return str(round(calculate(expression), 4))  # evaluates arithmetic only, never code
    except CalculatorError as error:
        return f"error: {error}"


# All episodes share this toolkit, because the calculator keeps no state. Create the toolkit in `execute` if a tool
# has state, such as files or a game.
toolkit = Toolkit(tools=[FunctionTool(calculator, permission=ALLOW)])


class MathAgentWorkflow(Workflow):
    """Run one episode: ask the agent and pass its answer to the judge."""

    name = "math_agent_workflow"

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        agent = Agent(
            name="math_react_agent",
            system_prompt=SYSTEM_PROMPT,
            model=model_tuner,  # this makes the agent trainable
            toolkit=toolkit,
            react_config=ReActConfig(max_iters=3),
            injection_config=NO_CLOCK,
        )
        reply = await agent.reply(UserMsg("user", workflow_task.task.main_query))
        return WorkflowOutput(metadata={"final_answer": reply.get_text_content() or ""})
