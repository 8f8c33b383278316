"""No framework: OpenAI's SDK and a loop, over either of its two APIs."""

import json

from example_tools import PARAMETERS, SYSTEM_PROMPT, calculator

from astuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask

DESCRIPTION = {
    "name": "calculator",
    "description": "Evaluate an arithmetic expression.",
    "parameters": PARAMETERS,
    "strict": True,  # OpenAI's SDK streams only strict tools; the prompt is the same
}
MOST_STEPS = 8


def run_tool(name: str, arguments: str) -> str:
    """Return the tool's result, or an error message that the model reads."""
    try:
        given = json.loads(arguments)
        return calculator(given["expression"]) if name == "calculator" else f"error: there is no tool {name}"
    except (ValueError, KeyError, TypeError) as error:
        return f"error: {type(error).__name__}: {error}"


class ChatCompletionsAgent(Workflow):
    """``/v1/chat/completions``."""

    streaming = False

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        async with model_tuner.as_openai_client() as client:
            return WorkflowOutput(metadata={"final_answer": await self.solve(client, workflow_task.task.main_query)})

    async def solve(self, client, question: str) -> str:
        messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]
        tools = [{"type": "function", "function": DESCRIPTION}]
        for _ in range(MOST_STEPS):
            message = await self.ask(client, model="astuner", messages=messages, tools=tools)
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                result = run_tool(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return message.content or ""

    async def ask(self, client, **request):
        if not self.streaming:
            return (await client.chat.completions.create(**request)).choices[0].message
        async with client.chat.completions.stream(**request) as stream:
            return (await stream.get_final_completion()).choices[0].message


class ResponsesAgent(ChatCompletionsAgent):
    """``/v1/responses``."""

    async def solve(self, client, question: str) -> str:
        items = [{"role": "user", "content": question}]
        tools = [{"type": "function", **DESCRIPTION}]
        for _ in range(MOST_STEPS):
            response = await self.ask(client, model="astuner", instructions=SYSTEM_PROMPT, input=items, tools=tools)
            items += response.output  # send the complete conversation each time
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                break
            for call in calls:
                result = run_tool(call.name, call.arguments)
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
        return response.output_text

    async def ask(self, client, **request):
        if not self.streaming:
            return await client.responses.create(**request)
        async with client.responses.stream(**request) as stream:
            return await stream.get_final_response()
