"""AgentScope 2.x over HTTP, with its own OpenAI model. `model=model_tuner` does the same without HTTP."""

from agentscope.agent import Agent, InjectionConfig
from agentscope.credential import OpenAICredential
from agentscope.message import UserMsg
from agentscope.model import OpenAIChatModel
from agentscope.permission import PermissionBehavior, PermissionDecision
from agentscope.tool import FunctionTool, Toolkit
from example_tools import SYSTEM_PROMPT, calculator

from astuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask

ALLOWED = PermissionDecision(behavior=PermissionBehavior.ALLOW, message="")


class AgentScope2OverHttp(Workflow):
    streaming = False

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        url, key = model_tuner.base_url_and_key()
        model = OpenAIChatModel(
            OpenAICredential(api_key=key, base_url=url),
            "astuner",
            stream=self.streaming,
            max_retries=0,  # the client retries where that is useful
            context_size=10**9,  # never compress the history
        )
        agent = Agent(
            "math",
            SYSTEM_PROMPT,
            model,
            Toolkit(tools=[FunctionTool(calculator, permission=ALLOWED)]),  # otherwise it waits for a person
            injection_config=InjectionConfig(inject_runtime_state=False),  # otherwise the prompt contains the time
        )
        result = await agent.reply(UserMsg(name="user", content=workflow_task.task.main_query))
        return WorkflowOutput(metadata={"final_answer": result.get_text_content() or ""})
