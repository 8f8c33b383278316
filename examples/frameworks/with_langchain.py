"""LangChain's `create_agent`."""

from example_tools import SYSTEM_PROMPT, calculator
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI

from astuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask


class LangChainAgent(Workflow):
    streaming = False

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        url, key = model_tuner.base_url_and_key()
        model = ChatOpenAI(model="astuner", base_url=url, api_key=key, streaming=self.streaming)
        agent = create_agent(model, tools=[calculator], system_prompt=SYSTEM_PROMPT)
        question = {"role": "user", "content": workflow_task.task.main_query}
        result = await agent.ainvoke({"messages": [question]})
        return WorkflowOutput(metadata={"final_answer": result["messages"][-1].text})
