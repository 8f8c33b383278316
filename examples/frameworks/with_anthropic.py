"""No framework: Anthropic's SDK and a loop."""

from anthropic import AsyncAnthropic
from example_tools import PARAMETERS, SYSTEM_PROMPT, calculator

from astuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask

TOOL = {"name": "calculator", "description": "Evaluate an arithmetic expression.", "input_schema": PARAMETERS}
MOST_STEPS = 8


def run_tool(block) -> dict:
    """Return the tool's result, or an error message that the model reads."""
    result = {"type": "tool_result", "tool_use_id": block.id}
    if block.name != "calculator" or not isinstance(block.input.get("expression"), str):
        return {**result, "is_error": True, "content": "call calculator with an expression"}
    return {**result, "content": calculator(block.input["expression"])}


class AnthropicAgent(Workflow):
    streaming = False

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        access = model_tuner.base_url_and_key()
        async with AsyncAnthropic(base_url=access.anthropic_base_url, api_key=access.api_key) as client:
            return WorkflowOutput(metadata={"final_answer": await self.solve(client, workflow_task.task.main_query)})

    async def solve(self, client, question: str) -> str:
        messages = [{"role": "user", "content": question}]
        common = {"model": "astuner", "max_tokens": 1000, "system": SYSTEM_PROMPT, "tools": [TOOL]}
        for _ in range(MOST_STEPS):
            reply = await self.ask(client, messages=messages, **common)
            messages.append({"role": "assistant", "content": reply.content})
            if reply.stop_reason != "tool_use":
                break
            results = [run_tool(block) for block in reply.content if block.type == "tool_use"]
            messages.append({"role": "user", "content": results})
        return "".join(block.text for block in reply.content if block.type == "text")

    async def ask(self, client, **request):
        if not self.streaming:
            return await client.messages.create(**request)
        async with client.messages.stream(**request) as stream:
            return await stream.get_final_message()
