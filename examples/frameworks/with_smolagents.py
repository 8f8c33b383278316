"""smolagents: an agent that calls tools, and one that writes Python."""

from example_tools import SYSTEM_PROMPT, calculator
from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool

from astuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask


class SmolToolCallingAgent(Workflow):
    streaming = False
    agent = ToolCallingAgent

    def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        url, key = model_tuner.base_url_and_key()
        model = OpenAIServerModel("astuner", api_base=url, api_key=key)
        agent = self.agent(
            tools=[tool(calculator)],
            model=model,
            instructions=SYSTEM_PROMPT,
            max_steps=6,
            stream_outputs=self.streaming,
            verbosity_level=0,
        )
        return WorkflowOutput(metadata={"final_answer": str(agent.run(workflow_task.task.main_query))})


class SmolCodeAgent(SmolToolCallingAgent):
    """Its Python is run in this process, by smolagents' own interpreter; give it a sandbox for anything in earnest."""

    agent = CodeAgent
