"""AgentScope 1.x over HTTP, with its own OpenAI model. `model=model_tuner` does the same without HTTP."""

from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIChatFormatter
from agentscope.message import Msg, TextBlock
from agentscope.model import OpenAIChatModel
from agentscope.tool import Toolkit, ToolResponse
from example_tools import SYSTEM_PROMPT
from example_tools import calculator as calculate

from astuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask


def calculator(expression: str) -> ToolResponse:
    """Evaluate an arithmetic expression.

    Args:
        expression (str): Numbers, + - * / and parentheses.
    """
    return ToolResponse(content=[TextBlock(type="text", text=calculate(expression))])


class AgentScopeOverHttp(Workflow):
    streaming = False

    def model(self, url: str, key: str) -> OpenAIChatModel:
        return OpenAIChatModel("astuner", api_key=key, stream=self.streaming, client_kwargs={"base_url": url})

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        access = model_tuner.base_url_and_key()
        model = self.model(access.base_url, access.api_key)
        toolkit = Toolkit()  # one per agent, because 1.0.7 changes it
        toolkit.register_tool_function(calculator)
        agent = ReActAgent("math", SYSTEM_PROMPT, model, OpenAIChatFormatter(), toolkit, parallel_tool_calls=True)
        agent.set_console_output_enabled(False)
        result = await agent.reply(Msg("user", workflow_task.task.main_query, role="user"))
        return WorkflowOutput(metadata={"final_answer": result.get_text_content() or ""})


class AgentScope107OverHttp(AgentScopeOverHttp):
    """The same in 1.0.7, where the argument has another name."""

    def model(self, url: str, key: str) -> OpenAIChatModel:
        return OpenAIChatModel("astuner", api_key=key, stream=self.streaming, client_args={"base_url": url})
