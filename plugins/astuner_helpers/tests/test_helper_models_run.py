"""Helper models in real runs: the `local` and `debug` backbones, the tiny model, and a judge that asks a helper."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from astuner import run
from astuner.contracts.errors import ConfigError
from astuner.support.json_lines import read_jsonl
from astuner.testing import ScriptedModel
from astuner_helpers import BudgetSpent

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "math_agent" / "math_agent.yaml"
JUDGE = """
from pydantic import BaseModel

from astuner import Judge, JudgeOutput


class Verdict(BaseModel):
    score: float


class Asks(Judge):
    def __init__(self, config, helper_models):
        self._helper = helper_models.get("judge", where="the judge")

    async def judge(self, workflow_task, output):
        said = str(output.metadata.get("final_answer"))
        messages = [{"role": "user", "content": f"{workflow_task.episode_id}: {said}"}]
        answer = await self._helper.ask(messages, purpose="judge", answer=Verdict)
        return JudgeOutput(reward=answer.data.score)
"""


def score(body: Mapping[str, Any]) -> dict[str, Any]:
    return {"score": len(body["messages"][0]["content"]) % 3 / 2}


@pytest.fixture
def experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("ASTUNER_HOME", str(tmp_path / "home"))
    (tmp_path / "asks.py").write_text(JUDGE)

    def write(server: ScriptedModel, **fields: Any) -> Path:
        content = yaml.safe_load(EXAMPLE.read_text())
        a = content["astuner"]
        helper = {"base_url": server.base_url, "model": "m", "price": {"input": 1e6, "output": 1e6}, **fields}
        a["helper_models"] = {"judge": helper}
        a["task_judge"] = {"judge": f"{tmp_path}/asks.py->Asks"}
        a["data"] = {**a.get("data", {}), "train_batch_size": 2, "max_validation_tasks": 1}
        a["rollout"] = {**a["rollout"], "num_repeat": 4, "compute_madness_checklist": []}
        a["rollout"]["workflow"] = f"{EXAMPLE.parent}/{a['rollout']['workflow']}"
        common = {"total_steps": 5, "test_freq": 1000, "val_before_train": False, "resume_freq": 1}
        a["trainer_common"] = {**a.get("trainer_common", {}), **common}
        a["experiment_dir"], a["experiment_name"] = str(tmp_path), "run"
        for section in a["task_reader"]["jsonl"].values():
            section["file_path"] = str(EXAMPLE.parent / section["file_path"])
        file = tmp_path / "experiment.yaml"
        file.write_text(yaml.safe_dump(content))
        return file

    return write


READER = """
from pathlib import Path

from astuner import TaskReader


class Dear(TaskReader):
    def read(self, split):
        Path(__file__).with_name("was-read").touch()
        return iter(())
"""


def test_a_judge_that_cannot_be_made_is_said_before_tasks_are_read_and_leaves_no_folder(
    tmp_path: Path, experiment: Any
) -> None:
    (tmp_path / "dear.py").write_text(READER)
    with ScriptedModel(score) as server:
        file = experiment(server, api_key_env="NO_SUCH_KEY_HERE")
        reader = f"astuner.task_reader.type={tmp_path}/dear.py->Dear"
        with pytest.raises(ConfigError, match="NO_SUCH_KEY_HERE"):
            run(file, [reader], backbone="local")
        assert server.requests == []
    assert not (tmp_path / "was-read").exists()
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_whose_judge_spends_its_budget_stops_and_goes_on_when_it_is_raised(
    tmp_path: Path, experiment: Any
) -> None:
    with ScriptedModel(score) as server:
        file = experiment(server, budget=200, max_tokens=30)  # a unit for each word: 64 for a step
        command = [sys.executable, "-m", "astuner", "run", str(file), "--backbone", "local"]
        stopped = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        assert stopped.returncode != 0, stopped.stdout
        told = " ".join(stopped.stderr.split())
        assert "the helper model 'judge' has spent" in told, stopped.stderr[-3000:]
        assert "of its budget of 200" in told
        assert "raise astuner.helper_models.judge.budget" in told
        assert "Traceback" not in stopped.stderr
        done = [row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "reward/mean" in row]
        assert 1 <= len(done) < 5, "what was done is saved"
        assert done[0]["helper/judge/calls"] == 8
        asked = len(server.requests)

        with pytest.raises(BudgetSpent):  # --resume alone changes nothing
            run(file, [], backbone="local", resume="must")
        result = run(file, ["astuner.helper_models.judge.budget=5000"], backbone="local", resume="must")
    rows = [row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "reward/mean" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert len(server.requests) > asked
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["helper_models"]["judge"]["calls"] == len(server.requests), "of the whole run, its first part too"
    assert "Helper model judge" in result.summary()


@pytest.mark.slow
def test_a_run_that_starts_over_counts_from_zero_and_answers_come_from_the_cache(
    tmp_path: Path, experiment: Any
) -> None:
    with ScriptedModel(score) as server:
        file = experiment(server)
        for asked in (9, 9):  # 8 episodes and one validation
            run(file, ["astuner.trainer_common.total_steps=1"], backbone="local", resume="never")
            assert len(server.requests) == asked
    used = json.loads((tmp_path / "run" / "summary.json").read_text())["helper_models"]["judge"]
    assert (used["calls"], used["cached"], used["cost"]) == (0, 9, 0)


def test_a_trial_without_training_counts_apart(tmp_path: Path, experiment: Any) -> None:
    with ScriptedModel(score) as server:
        file = experiment(server, budget_tokens=1)
        with pytest.raises(BudgetSpent):
            run(file, [], backbone="debug")
    assert not server.requests


def test_a_name_that_no_helper_has_stops_the_run_before_it_begins(experiment: Any) -> None:
    with ScriptedModel(score) as server:
        file = experiment(server)
        content = yaml.safe_load(file.read_text())
        content["astuner"]["helper_models"] = {"writer": content["astuner"]["helper_models"]["judge"]}
        file.write_text(yaml.safe_dump(content))
        with pytest.raises(ConfigError, match=r"the judge: .*'judge'; available: writer"):
            run(file, [], backbone="local")


def test_a_dry_run_says_so_too(experiment: Any) -> None:
    with ScriptedModel(score) as server:
        file = experiment(server)
        content = yaml.safe_load(file.read_text())
        section = {"helper_model": "jugde", "criteria": "It is right."}
        content["astuner"]["task_judge"] = {"judge": "llm_judge", "llm_judge": section}
        file.write_text(yaml.safe_dump(content))
        with pytest.raises(ConfigError, match="helper model 'jugde'; available: judge; did you mean judge"):
            run(file, [], backbone="local", dry_run=True)
        section["helper_model"] = "judge"
        file.write_text(yaml.safe_dump(content))
        assert "llm_judge" in run(file, [], backbone="local", dry_run=True).text
        assert not server.requests
