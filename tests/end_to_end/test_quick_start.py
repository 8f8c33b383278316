"""The quick start's file and workflow, as its page has them: of many packages, in a run of the debug backbone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from astuner import run

ROOT = Path(__file__).resolve().parents[2]

QUICK_START = """
from astuner import ModelTuner, Workflow, WorkflowTask, WorkflowOutput
from agentscope.message import Msg


class MathAgentWorkflow(Workflow):
    name: str = "math_agent_workflow"

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        from agentscope.agent import ReActAgent
        from agentscope.formatter import DashScopeChatFormatter
        from agentscope.memory import InMemoryMemory
        from agentscope.tool import Toolkit, execute_python_code

        self.toolkit = Toolkit()
        self.toolkit.register_tool_function(execute_python_code)
        self.agent = ReActAgent(
            name="math_react_agent",
            sys_prompt="You should return your final answer within \\\\boxed{{}}.",
            model=model_tuner,
            formatter=DashScopeChatFormatter(),
            toolkit=self.toolkit,
            memory=InMemoryMemory(),
            max_iters=2,
        )
        self.agent.set_console_output_enabled(False)
        result = await self.agent.reply(Msg("user", workflow_task.task.main_query, role="user"))
        return WorkflowOutput(reward=None, metadata={"final_answer": str(result.content)})
"""


def test_the_quick_starts_file_and_workflow_run_as_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its YAML unchanged, in the folder it names; only model and data are others, since there is no hub here."""
    folder = tmp_path / "math_agent"
    folder.mkdir()
    seed = ROOT / "astuner_core" / "tests" / "data" / "seeds" / "quick_start.yaml"
    (folder / "math_agent.yaml").write_bytes(seed.read_bytes())
    (folder / "workflow.py").write_text(QUICK_START)
    monkeypatch.chdir(tmp_path)
    run(
        "math_agent/math_agent.yaml",
        [
            "astuner.model.path=tiny-calculator",
            "astuner.task_reader.type=jsonl",
            f"astuner.task_reader.jsonl.training.file_path={ROOT}/examples/math_agent/data/train.jsonl",
            "astuner.rollout.max_model_len=1024",  # the tiny model was made for no more than 2048
        ],
        backbone="debug",
    )
    lines = (tmp_path / "launcher_record" / "math_agent.debug" / "episodes" / "debug.jsonl").read_text().splitlines()
    episodes = [json.loads(line) for line in lines]
    assert len(episodes) == 2
    assert all(e["turns"] and e["reward"] is not None for e in episodes)
