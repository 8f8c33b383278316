"""No command runs Python files of a model folder, whatever it reads on stdin."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from astuner import load_plugins

EXPERIMENT = """
astuner:
  model: {path: ./model}
  task_reader: {type: jsonl, jsonl: {training: {file_path: tasks.jsonl}, validation: {file_path: tasks.jsonl}}}
  data: {train_batch_size: 1}
  rollout: {workflow: agent.py->Once, num_repeat: 2, max_response_length_in_one_turn: 4, max_model_len: 128}
  trainer_common: {total_steps: 1, val_before_train: false}
"""
AGENT = """
from astuner import Workflow, WorkflowOutput

class Once(Workflow):
    async def execute(self, workflow_task, model_tuner):
        reply = await model_tuner.chat([{"role": "user", "content": workflow_task.task.main_query}])
        return WorkflowOutput(response=reply.text, reward=float(len(reply.text) % 2))
"""
COMMANDS = (
    "run e.yaml --backbone local --run-dir r",
    "run e.yaml --backbone debug --run-dir r",
    "config check e.yaml --backbone local",
    "config check e.yaml --backbone verl",
    "config check e.yaml --backbone trinity",
    "chat e.yaml --backbone local --checkpoint base",
    "eval e.yaml --backbone local --checkpoint base",
    "serve e.yaml --backbone local --checkpoint base",
    "serve e.yaml --backbone local --checkpoint ./model",
    "export e.yaml --checkpoint ./model --to hf --out out",
    "export e.yaml --checkpoint ./model --to gguf --out out.gguf",
    "promote e.yaml --checkpoint ./model",
    "check tokens e.yaml",
    "check tokens --model ./model",
    "doctor e.yaml",
)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_runs_code_of_a_model(command: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(load_plugins().hook.locate_model(path="tiny-calculator"), model)
    (model / "evil.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'code_ran')!r})\n")
    for name, kind in (("config.json", "AutoConfig"), ("tokenizer_config.json", "AutoTokenizer")):
        content = json.loads((model / name).read_text())
        content |= {"model_type": "evil", "tokenizer_class": "Evil", "auto_map": {kind: "evil.Evil"}}
        (model / name).write_text(json.dumps(content))
    (tmp_path / "e.yaml").write_text(EXPERIMENT)
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "tasks.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    done = subprocess.run(
        [Path(sys.executable).with_name("astuner"), *command.split()],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "ASTUNER_HOME": str(tmp_path / "home")},
        input="y\n" * 20,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert not (tmp_path / "code_ran").exists(), done.stdout + done.stderr
    assert "Do you wish to run" not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode not in (0, None) or "doctor" in command, done.stdout + done.stderr
