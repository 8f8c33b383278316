"""A run that ends early prints one message without a traceback, and a command that resumes it in a shell."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

AGENT = """
import os, resource, signal, time
from pathlib import Path
from astuner import Judge, JudgeOutput, Workflow, WorkflowOutput

HERE = Path(__file__).parent
ARMED = HERE / "armed"

def end():
    if ARMED.exists():
        code = ARMED.read_text()
        ARMED.unlink()
        exec(code)

class Once(Workflow):
    async def execute(self, workflow_task, model_tuner):
        reply = await model_tuner.chat([{"role": "user", "content": workflow_task.task.main_query}])
        return WorkflowOutput(response=reply.text)

class Ends(Judge):
    def judge(self, workflow_task, output):
        if workflow_task.group_id >= "g0000002":
            end()
        return JudgeOutput(reward=float(len(output.response) % 3))
"""
EXPERIMENT = """
astuner:
  model: {path: tiny-calculator}
  task_reader: {type: jsonl, jsonl: {training: {file_path: train.jsonl}}}
  data: {train_batch_size: 2}
  rollout: {workflow: agent.py->Once, num_repeat: 2, max_response_length_in_one_turn: 8, max_model_len: 256}
  task_judge: {judge: agent.py->Ends}
  trainer_common: {total_steps: 3, val_before_train: false, save_freq: 100, logger: [jsonl]}
"""
TYPED = (
    "astuner run 'my files/e.yaml' --backbone local --run-dir 'runs/ü 1' 'astuner.project_name=$(id) `x` \"y\"' "
    "'astuner.trainer_common.logger=[console, jsonl]'"
)


@dataclass(frozen=True)
class Ending:
    """How a run ends, and what it prints."""

    code: str
    """Code that the judge runs in step 2."""
    status: int
    message: str


CTRL_C = "os.kill(os.getpid(), signal.SIGINT)"
ENDINGS = {
    "Ctrl-C": Ending(CTRL_C, 130, "astuner: "),
    "Ctrl-C twice": Ending(f"{CTRL_C}; {CTRL_C}", 130, "astuner: "),
    "SIGTERM": Ending("os.kill(os.getpid(), signal.SIGTERM)", 130, "astuner: "),
    "kill -9": Ending("os.kill(os.getpid(), signal.SIGKILL)", -9, "ended unexpectedly"),
    "full disk": Ending("resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))", 1, "Free disk space"),
    "backbone": Ending(
        "import torch; torch.optim.AdamW.step = lambda *_, **__: (_ for _ in ()).throw(ValueError('broken'))",
        1,
        "broken",
    ),
}


def run_in_shell(folder: Path, command: str) -> tuple[int, str]:
    """Return the exit status of a pasted command, and everything it printed."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    process = subprocess.run(
        ["bash", "-c", f"exec {command}"],
        cwd=folder,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    return process.returncode, process.stdout


@pytest.mark.parametrize("name", ENDINGS)
def test_every_ending_prints_a_message_and_a_command_that_resumes(tmp_path: Path, name: str) -> None:
    ending, files = ENDINGS[name], tmp_path / "my files"
    files.mkdir()
    (files / "e.yaml").write_text(EXPERIMENT)
    (files / "agent.py").write_text(AGENT)
    (files / "train.jsonl").write_text("".join(f'{{"question": "{n} + 1?"}}\n' for n in range(8)))
    (files / "armed").write_text(ending.code)
    status, printed = run_in_shell(tmp_path, TYPED)
    print(printed)
    assert status == ending.status
    assert "Traceback" not in printed
    assert len(re.findall("^astuner: .*", printed, re.M)) == 1
    assert ending.message in printed
    assert name != "backbone" or "optim.py" in (tmp_path / "runs" / "ü 1" / "run.log").read_text()
    (command,) = re.findall(r"continue with: (astuner run .*--resume)", printed)
    status, printed = run_in_shell(tmp_path, command)
    assert status == 0, printed
    rows = map(json.loads, (tmp_path / "runs" / "ü 1" / "metrics.jsonl").read_text().splitlines())
    assert [row["step"] for row in rows if "reward/mean" in row] == [1, 2, 3]
