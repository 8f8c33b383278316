"""The quick start's file and workflow unchanged on AgentScope 1.x, and the same agent on 2.x."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

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


EXAMPLE = ROOT / "examples" / "math_agent"
FORMS = {"agentscope-1.0.21": "agentscope1.py", "here": "workflow.py"}
"""Environment -> the file with the math agent for its AgentScope."""


def astuner(environment: str, folder: Path, *arguments: str) -> None:
    """Run the command of an environment in ``folder``; skips the test if the environment lacks a package."""
    python = Path(sys.executable) if environment == "here" else ROOT / f".venv-{environment}" / "bin" / "python"
    for package in ("torch", "astuner_math"):
        if subprocess.run([python, "-c", f"import {package}"], capture_output=True).returncode:
            pytest.skip(f".venv-{environment} does not contain {package}; to remake it: make .venv-{environment}/.done")
    done = subprocess.run(
        [python.with_name("astuner"), "run", *arguments], cwd=folder, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr


def write_quick_start(folder: Path) -> list[str]:
    """Write the quick start's files, its YAML unchanged; return overrides for what needs a hub."""
    (folder / "math_agent").mkdir()
    seed = ROOT / "astuner_core" / "tests" / "data" / "seeds" / "quick_start.yaml"
    (folder / "math_agent" / "math_agent.yaml").write_bytes(seed.read_bytes())
    (folder / "math_agent" / "workflow.py").write_text(QUICK_START)
    return [
        "math_agent/math_agent.yaml",
        "astuner.model.path=tiny-calculator",
        "astuner.task_reader.type=jsonl",
        f"astuner.task_reader.jsonl.training.file_path={EXAMPLE}/data/train.jsonl",
        "astuner.rollout.max_model_len=1024",  # the tiny model was made for no more than 2048
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "environment",
    [pytest.param(name, marks=pytest.mark.needs(name)) for name in ("agentscope-1.0.7", "agentscope-1.0.21")],
)
def test_the_quick_starts_file_and_workflow_run_as_they_are_written(environment: str, tmp_path: Path) -> None:
    astuner(environment, tmp_path, *write_quick_start(tmp_path), "--backbone", "debug")
    lines = (tmp_path / "launcher_record" / "math_agent.debug" / "episodes" / "debug.jsonl").read_text().splitlines()
    episodes = [json.loads(line) for line in lines]
    assert len(episodes) == 2
    assert all(e["turns"] and e["reward"] is not None for e in episodes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "environment",
    [pytest.param(name, marks=pytest.mark.needs(name)) for name in ("agentscope-1.0.7", "agentscope-1.0.21")],
)
def test_the_quick_starts_workflow_trains_a_real_model(environment: str, tmp_path: Path) -> None:
    short = ["astuner.data.train_batch_size=8", "astuner.trainer_common.total_steps=2"]
    astuner(environment, tmp_path, *write_quick_start(tmp_path), *short, "--backbone", "local")
    certificate = json.loads((tmp_path / "launcher_record" / "math_agent" / "certificate.json").read_text())
    assert certificate["turns"] >= 2 * 8 * 4
    assert certificate["tokens"]["trained"] > 0
    assert set(certificate["branches"]) <= {"tools_changed"}  # the summary after max_iters, without tools


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.needs("agentscope-1.0.21")
def test_the_same_agent_learns_equally_well_on_both_versions_of_agentscope(tmp_path: Path) -> None:
    """The math agent as `ReActAgent` and as `Agent`: the same model, tasks, seed and number of steps."""
    success = {}
    for environment, file in FORMS.items():
        settings = [
            f"rollout.workflow={EXAMPLE}/{file}->MathAgentWorkflow",
            "trainer_common.total_steps=40",
            "trainer_common.test_freq=40",
            "trainer_common.save_freq=40",
        ]
        overrides = [f"astuner.{setting}" for setting in settings]
        (folder := tmp_path / environment).mkdir()
        astuner(environment, folder, str(EXAMPLE / "math_agent.yaml"), *overrides, "--backbone", "local")
        metrics = (folder / "launcher_record" / "math_agent" / "metrics.jsonl").read_text().splitlines()
        success[environment] = [line["val/success"] for line in map(json.loads, metrics) if "val/success" in line]
    for environment, (before, *_, after) in success.items():
        assert after > before + 0.1, (environment, success)
    after_1, after_2 = (values[-1] for values in success.values())
    assert abs(after_1 - after_2) < 0.25, success
