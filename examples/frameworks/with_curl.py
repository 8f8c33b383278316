"""No SDK either: any program that can send a request, here curl."""

import asyncio
import json

from example_tools import SYSTEM_PROMPT
from with_openai import DESCRIPTION, MOST_STEPS, run_tool

from astuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask


class CurlAgent(Workflow):
    streaming = False

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        access = model_tuner.base_url_and_key()
        question = {"role": "user", "content": workflow_task.task.main_query}
        messages = [{"role": "system", "content": SYSTEM_PROMPT}, question]
        tools = [{"type": "function", "function": DESCRIPTION}]
        for _ in range(MOST_STEPS):
            body = {"messages": messages, "tools": tools, "stream": self.streaming}
            answer = await curl(f"{access.base_url}/chat/completions", access.api_key, json.dumps(body))
            message = pieced_together(answer) if self.streaming else json.loads(answer)["choices"][0]["message"]
            messages.append(message)
            if not message.get("tool_calls"):
                break
            for call in message["tool_calls"]:
                result = run_tool(call["function"]["name"], call["function"]["arguments"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        return WorkflowOutput(metadata={"final_answer": message["content"] or ""})


async def curl(url: str, key: str, body: str) -> str:
    """Return curl's output. The key is passed through a pipe, because process lists show arguments."""
    settings = [
        ("url", url),
        ("header", f"Authorization: Bearer {key}"),
        ("header", "Content-Type: application/json"),
        ("data-raw", body),
    ]
    pipe = asyncio.subprocess.PIPE
    program = await asyncio.create_subprocess_exec(
        *("curl", "--silent", "--show-error", "--fail-with-body", "--config", "-"), stdin=pipe, stdout=pipe, stderr=pipe
    )
    try:
        config = "\n".join(f"{name} = {json.dumps(value)}" for name, value in settings)
        written, complaint = await program.communicate(config.encode())
    finally:
        if program.returncode is None:  # the episode was canceled
            program.kill()
            await program.wait()
    if program.returncode:
        raise RuntimeError(complaint.decode() + written.decode())
    return written.decode()


def pieced_together(events: str) -> dict:
    """Return the assistant's message from the chunks of a stream."""
    message = {"role": "assistant", "content": ""}
    for line in events.splitlines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        delta = json.loads(line.removeprefix("data: "))["choices"][0]["delta"]
        message["content"] += delta.get("content") or ""
        for piece in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if piece["index"] == len(calls):
                calls.append({"id": piece["id"], "type": "function", "function": dict(piece["function"])})
            else:
                calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    return message
