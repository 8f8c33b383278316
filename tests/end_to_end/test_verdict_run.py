"""The last lines of real runs: the `local` backbone, the tiny model and the real agent."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from astuner import run
from astuner.cli import main
from astuner.runs.launch import RunResult

pytest.importorskip("astuner_local")
pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "math_agent"
JUDGE = """
from astuner import Judge, JudgeOutput

class Constant(Judge):
    def judge(self, workflow_task, output):
        return JudgeOutput(reward=0.5)
"""


def settings(tmp_path: Path) -> list[str]:
    common = {"trainer_common.total_steps": 3, "trainer_common.test_freq": 1000, "data.train_batch_size": 2}
    given = [f"astuner.{key}={value}" for key, value in common.items()]
    given += ["astuner.data.max_validation_tasks=16", "astuner.rollout.num_repeat=4"]
    given += ["astuner.rollout.compute_madness_checklist=[]"]  # what it aborts gets a reward of its own
    given += ["astuner.trainer_common.use_kl_loss=false"]
    return [*given, f"astuner.experiment_dir={tmp_path}", "astuner.experiment_name=run"]


def train(tmp_path: Path, *overrides: str) -> RunResult:
    return run(EXAMPLE / "math_agent.yaml", [*settings(tmp_path), *overrides], backbone="local")


def test_a_constant_judge_trains_nothing_and_every_part_of_the_run_says_so(tmp_path: Path) -> None:
    (tmp_path / "constant.py").write_text(JUDGE)
    result = train(tmp_path, f"astuner.task_judge.judge={tmp_path}/constant.py->Constant")
    *_, last, _ = result.summary().splitlines()
    assert re.match(r"(?i)verdict +Not trained: every group had equal rewards \(all are 0\.5\)\. ", last)
    steps = r"(?m)^Optimizer steps +0, 0 of 3 training steps updated the weights; 0 tokens in updates$"
    assert re.search(steps, result.summary())
    folder = tmp_path / "run"
    report = (folder / "report.md").read_text()
    assert "> ! The run finished. No training step updated the weights." in report
    assert "> ✓ The run" not in report
    written = json.loads((folder / "summary.json").read_text())["report"]
    assert written["verdict"] == result.verdict
    assert (written["updated"]["tokens"], written["updated"]["optimizer_steps"]) == (0, 0)


def test_a_constant_judge_with_a_kl_term_moves_weights_and_teaches_nothing(tmp_path: Path) -> None:
    (tmp_path / "constant.py").write_text(JUDGE)
    kl = "astuner.trainer_common.use_kl_loss=true"
    result = train(tmp_path, f"astuner.task_judge.judge={tmp_path}/constant.py->Constant", kl)
    *_, last, _ = result.summary().splitlines()
    said = r"No learning signal: every group had equal rewards \(all are 0\.5\), so only the KL or entropy term changed"
    assert re.match(rf"(?i)verdict +{said} the weights\. ", last)


def test_two_tasks_at_a_rate_that_changes_nothing_are_said_to_have_taught_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (EXAMPLE / "data" / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "two.jsonl").write_text("".join(lines[:2]))
    two = [f"astuner.task_reader.jsonl.training.file_path={tmp_path}/two.jsonl", "astuner.trainer_common.optim.lr=1e-9"]
    *_, last, _ = train(tmp_path, *two, "astuner.rollout.val_kwargs.temperature=0").summary().splitlines()
    nothing = r"(?i)verdict +(No change|No learning signal|Not trained): "
    assert re.match(nothing, last), last
    *_, last, _ = train(tmp_path, *two, "astuner.experiment_name=sampled").summary().splitlines()
    assert re.match(nothing.replace("(No", "(Inconclusive|No", 1), last), last
    blind = ["astuner.task_reader.jsonl.validation=null", "astuner.experiment_name=blind"]
    capsys.readouterr()
    command = ["run", str(EXAMPLE / "math_agent.yaml"), *settings(tmp_path), *two, *blind]
    with pytest.raises(SystemExit) as ended:
        main([*command, "--backbone", "local", "--json"])
    assert ended.value.code == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told["verdict"]) == {"word", "text", "level"}
    assert told["updated"]["of"] == 3
    assert "did not change beyond chance" in told["verdict"]["text"] or not told["updated"]["steps"], told["verdict"]
