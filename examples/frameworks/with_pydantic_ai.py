"""pydantic-ai."""

from example_tools import SYSTEM_PROMPT, calculator
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from astuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask


class PydanticAgent(Workflow):
    streaming = False

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        url, key = model_tuner.base_url_and_key()
        model = OpenAIChatModel("astuner", provider=OpenAIProvider(base_url=url, api_key=key))
        agent = Agent(model, system_prompt=SYSTEM_PROMPT, tools=[calculator])
        # Not agent.run_stream(), which ends at the first text, even if the reply also calls tools.
        watcher = watch if self.streaming else None
        result = await agent.run(workflow_task.task.main_query, event_stream_handler=watcher)
        return WorkflowOutput(metadata={"final_answer": result.output})


async def watch(context, events) -> None:
    """Where a program would show what comes in; that there is one makes the requests streaming ones."""
    async for _ in events:
        pass
