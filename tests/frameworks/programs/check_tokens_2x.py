"""``astuner check tokens`` of agents of AgentScope 2.x: situation -> the report as data and as text."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import agentscope_2x_situations as situations
from agentscope_2x_situations import LONG, SHORT, WITH_TOOL, asking, tool
from harness import tell

from astuner import WorkflowOutput
from astuner.testing import fake_config, make_tokenizer
from astuner_record.token_check.checks import check_config


async def structured_and_plain(tuner: Any) -> WorkflowOutput:
    agent = situations.build(tuner, [tool()])
    await agent.reply(situations.QUESTION, structured_schema=situations.Answer)
    return situations.output(await agent.reply(situations.QUESTION))


WORKS = {
    "compression": asking(LONG, "y" * 400, "And?", context_size=250, context_config=SHORT),
    "compression_tool": asking(LONG, "y" * 400, tools=[tool()], context_size=4000, context_config=WITH_TOOL),
    "interruption": situations.interrupted(tool(situations.wait_a_moment)),
    "parallel_tools": asking("6 times 7?", tools=[tool(), tool(situations.fail, is_concurrency_safe=False)]),
    "retries": asking("6 by 7?", tools=[tool(situations.fail)], clock=True),
    "hand_off": situations.hand_off,
    "one_model_for_two": situations.one_model_for_two,
    "structured_and_plain": structured_and_plain,
    "hints": asking("6 times 7?", tools=[tool()], middlewares=[situations.Hints()]),
    "never_confirmed": asking("6 times 7?", tools=[tool(permission=None)]),
}
WORKFLOW = """
from __main__ import WORKS
from astuner import Workflow

class Check(Workflow):
    async def execute(self, workflow_task, model_tuner):
        return await WORKS[{name!r}](model_tuner)
"""

if __name__ == "__main__":
    reports = {}
    with tempfile.TemporaryDirectory() as folder:
        make_tokenizer().save_pretrained(Path(folder) / "model")
        (Path(folder) / "tasks.jsonl").write_text('{"question": "6 times 7?"}\n')
        reader = f"  task_reader: {{type: jsonl, jsonl: {{training: {{file_path: {folder}/tasks.jsonl}}}}}}\n"
        for name in WORKS:
            (Path(folder) / f"{name}.py").write_text(WORKFLOW.format(name=name))
            parts = [f"astuner.model.path={folder}/model", f"astuner.rollout.workflow={folder}/{name}.py->Check"]
            report = check_config(fake_config(Path(folder), reader, parts), scenarios=["parallel-calls"])
            reports[name] = {**report.as_dict(), "text": report.text()}
    tell(reports)
