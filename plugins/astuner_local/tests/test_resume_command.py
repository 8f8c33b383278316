"""The command that a run prints when it ends early continues it, whatever was typed; here it is executed."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from astuner.cli import main

pytestmark = pytest.mark.slow

AGENT = """
import os, signal
from pathlib import Path
from astuner import Judge, JudgeOutput, Workflow, WorkflowOutput
from astuner.contracts.errors import ConfigError

HERE = Path(__file__).parent

class Once(Workflow):
    async def execute(self, workflow_task, model_tuner):
        reply = await model_tuner.chat([{"role": "user", "content": workflow_task.task.main_query}])
        return WorkflowOutput(response=reply.text)

class Stops(Judge):
    def judge(self, workflow_task, output):
        armed = HERE / "armed"
        if armed.exists() and workflow_task.group_id >= armed.read_text().split()[0]:
            how = armed.read_text().split()[1]
            armed.unlink()
            if how == "error":
                raise ConfigError("the budget is spent.")
            os.kill(os.getpid(), signal.SIGINT)
        return JudgeOutput(reward=float(len(output.response) % 3))
"""
EXPERIMENT = """
astuner:
  model: {path: tiny-calculator}
  experiment_dir: runs
  experiment_name: mine
  task_reader: {type: jsonl, jsonl: {training: {file_path: train.jsonl}}}
  data: {train_batch_size: 2}
  rollout: {workflow: agent.py->Once, num_repeat: 2, max_response_length_in_one_turn: 8, max_model_len: 256}
  task_judge: {judge: agent.py->Stops}
  trainer_common: {total_steps: 3, val_before_train: false, save_freq: 100, logger: [jsonl]}
"""


def write(folder: Path, armed: str) -> None:
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "e.yaml").write_text(EXPERIMENT)
    (folder / "agent.py").write_text(AGENT)
    (folder / "train.jsonl").write_text("".join(f'{{"question": "{n} + 1?"}}\n' for n in range(8)))
    (folder / "armed").write_text(armed)


def end_of(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Return the exit status of a command, and what it printed last."""
    status = 0
    try:
        main(arguments)
    except SystemExit as e:
        status = int(e.code or 0)
    out, err = capfd.readouterr()
    return status, (err if status else out).strip()


def steps(run_dir: Path) -> list[int]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row["step"] for row in rows if "reward/mean" in row]


STEP_2, STEP_1 = "g0000002 signal", "g0000000 signal"

MEMBERS = [
    # what is typed, the run folder, when it ends
    ("run e.yaml --backbone local --run-dir r", "r", STEP_2),
    ("run e.yaml --backbone local --run-dir 'my runs/ü 1'", "my runs/ü 1", STEP_2),
    ("run e.yaml --backbone local --run-dir 007", "007", STEP_2),
    ("run e.yaml --backbone local", "runs/mine", STEP_2),
    ("run e.yaml astuner.backbone=local astuner.experiment_name=other", "runs/other", STEP_2),
    ("run e.yaml --backbone local --seed 7 --steps 4 --run-dir r", "r", STEP_2),
    ("run e.yaml --backbone local 'astuner.trainer_common.logger=[console, jsonl]' --run-dir r", "r", STEP_2),
    ("-p no:trackers run e.yaml --backbone local --run-dir r", "r", STEP_2),
    ("run 'sub folder/e.yaml' --backbone local --run-dir r", "r", STEP_2),
    ("run e.yaml --backbone local --no-resume --run-dir r", "r", STEP_2),
    ("run e.yaml --backbone local --run-dir r astuner.rollout.num_repeat=3", "r", "g0000002 error"),
    ("run e.yaml --backbone local --run-dir r", "r", STEP_1),
    ("run e.yaml --backbone local 'astuner.project_name=$(id) `x`' --run-dir r", "r", STEP_2),
]


@pytest.mark.parametrize(("typed", "run_dir", "armed"), MEMBERS)
def test_the_printed_command_continues_the_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    typed: str,
    run_dir: str,
    armed: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "sub folder" if "sub folder" in typed else tmp_path, armed)
    status, printed = end_of(shlex.split(typed), capfd)
    assert status in (130, 2), printed
    (command,) = re.findall(r"(?:continue|start again) with: (astuner .*)$", printed)
    folder = tmp_path / run_dir
    folder = folder if folder.exists() else tmp_path / "sub folder" / run_dir
    done = steps(folder) if (folder / "metrics.jsonl").exists() else []
    assert done == ([] if armed == STEP_1 else [1])
    assert ("--resume" in command) == bool(done)
    if done:  # and doctor prints the same
        _, findings = end_of(["doctor", str(folder)], capfd)
        assert f"type: {command}" in findings
    status, printed = end_of(shlex.split(command)[1:], capfd)
    assert status == 0, printed
    assert steps(folder) == list(range(1, 5 if "--steps 4" in typed else 4))
    assert len(list(folder.parent.glob(f"{folder.name}.*"))) == (0 if done else 1)  # where nothing was saved


def test_a_run_that_is_stopped_twice_prints_it_twice(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, STEP_2)
    _, printed = end_of(shlex.split("run e.yaml --backbone local --run-dir r"), capfd)
    (tmp_path / "armed").write_text("g0000004 signal")
    (command,) = re.findall(r"continue with: (astuner .*)$", printed)
    status, printed = end_of(shlex.split(command)[1:], capfd)
    assert status == 130
    assert re.findall(r"continue with: (astuner .*)$", printed) == [command]
    assert end_of(shlex.split(command)[1:], capfd)[0] == 0
    assert steps(tmp_path / "r") == [1, 2, 3]


def test_a_run_that_starts_over_prints_what_continues_the_earlier_one(tmp_path, monkeypatch, capfd):
    """Where a key was changed, and where the earlier run is finished."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path, STEP_2)
    end_of(shlex.split("run e.yaml --backbone local --run-dir r"), capfd)
    typed = "run e.yaml --backbone local --run-dir r --seed 7 astuner.trainer_common.optim.lr=0.001"
    status, printed = end_of(shlex.split(typed), capfd)
    assert status == 0, printed
    (earlier,) = tmp_path.glob("r.2*")
    note = next(line for line in (tmp_path / "r" / "run.log").read_text().splitlines() if "new run starts" in line)
    assert "astuner.seed is 7 (was 0)" in note
    assert "astuner.trainer_common.optim.lr is 0.001 (was " in note
    status, printed = end_of(shlex.split(note[note.index("astuner run") :])[1:], capfd)
    assert status == 0, printed
    assert steps(earlier) == [1, 2, 3]
    _, printed = end_of(shlex.split(typed), capfd)
    note = next(line for line in (tmp_path / "r" / "run.log").read_text().splitlines() if "new run starts" in line)
    assert "the earlier run is finished" in note
    (finished,) = set(tmp_path.glob("r.2*")) - {earlier}
    words = shlex.split(note[note.index("astuner run") :])[1:]
    status, printed = end_of([*words, "--steps", "4"], capfd)
    assert status == 0, printed
    assert steps(finished) == [1, 2, 3, 4]
