"""openai-agents, over either of OpenAI's two APIs."""

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from example_tools import SYSTEM_PROMPT, calculator

from astuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask

set_tracing_disabled(True)  # otherwise every run is sent to openai.com


class OpenAIAgentsChat(Workflow):
    """``/v1/chat/completions``."""

    streaming = False
    api = OpenAIChatCompletionsModel

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        async with model_tuner.as_openai_client() as client:
            model = self.api("astuner", client)
            agent = Agent("math", instructions=SYSTEM_PROMPT, model=model, tools=[function_tool(calculator)])
            answer = await self.ask(agent, workflow_task.task.main_query)
        return WorkflowOutput(metadata={"final_answer": answer})

    async def ask(self, agent: Agent, question: str) -> str:
        if not self.streaming:
            return (await Runner.run(agent, question)).final_output
        result = Runner.run_streamed(agent, question)
        async for _ in result.stream_events():
            pass
        return result.final_output


class OpenAIAgentsResponses(OpenAIAgentsChat):
    """``/v1/responses``, which openai-agents uses where nothing is said."""

    api = OpenAIResponsesModel
