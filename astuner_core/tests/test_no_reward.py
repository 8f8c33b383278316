"""A workflow that never gives a reward, where nobody else does, is found before its first episode."""

from __future__ import annotations

from pathlib import Path

import pytest

from astuner.cli import main
from astuner.contracts.errors import ConfigError
from astuner.plugins.user_code import import_user_code
from astuner.rollout.rewards import check_rewards, never_gives_reward
from astuner.runs.launch import make_plan
from astuner.runs.tasks import TaskSet
from astuner.testing import fake_config
from tests.table import table

CODE = """
import dataclasses
import astuner
from astuner import Workflow, WorkflowOutput
from astuner import WorkflowOutput as Output

def elsewhere(**given):
    return WorkflowOutput(reward=1.0, **given)

def logged(function):
    def wrapper(*args):
        found = function(*args)
        found.reward = 1.0
        return found
    return wrapper

class Flow(Workflow):
    {before}async def execute(self, workflow_task, model_tuner):
        reply = await model_tuner.chat([{{"role": "user", "content": "hi"}}])
        {body}
"""
LINE = CODE[: CODE.index("async def execute")].count("\n") + 1
NEVER = [
    "return WorkflowOutput(response=reply)",
    "return WorkflowOutput()",
    "return Output(metadata={'final_answer': reply})",
    "return astuner.WorkflowOutput(response=reply, metrics={'m': 1.0})",
    "return WorkflowOutput(reward=None, response=reply)",
    "return WorkflowOutput(is_success=True)",
    "out = WorkflowOutput(response=reply)\n        return out",
    "out = WorkflowOutput()\n        out.metadata['a'] = reply\n        out.response = reply\n        return out",
    "if reply:\n            return WorkflowOutput(response=reply)\n        return WorkflowOutput(metadata={})",
    "try:\n            return WorkflowOutput(response=reply)\n        except ValueError:\n            raise",
    "def reward(x):\n            return x\n        return WorkflowOutput(metadata={'reward': reward(1)})",
    "for _ in range(3):\n            pass\n        else:\n            return WorkflowOutput(response=reply)",
]
PERHAPS = [
    "return WorkflowOutput(reward=1.0)",
    "return WorkflowOutput(reward=None if reply else 1.0)",
    "return WorkflowOutput(**{'reward': 1.0})",
    "return elsewhere(response=reply)",
    "return 1.0",
    "out = WorkflowOutput()\n        out.reward = 1.0\n        return out",
    "out = WorkflowOutput()\n        setattr(out, 'reward', 1.0)\n        return out",
    "out = WorkflowOutput()\n        return dataclasses.replace(out, reward=1.0)",
    "out = other = WorkflowOutput()\n        other.reward = 1.0\n        return out",
    "out = WorkflowOutput()\n        other = out\n        other.reward = 1.0\n        return out",
    "out = WorkflowOutput()\n        if reply:\n            out = elsewhere()\n        return out",
    "if reply:\n            return WorkflowOutput(reward=1.0)\n        return WorkflowOutput()",
    "raise NotImplementedError",
    "pass",
    "return self.made(reply)",
    "WorkflowOutput = elsewhere\n        return WorkflowOutput()",
    "from json import loads as WorkflowOutput\n        return WorkflowOutput()",
]


def flow(folder: Path, body: str, before: str = "") -> None:
    (folder / "flow.py").write_text(CODE.format(body=body, before=before))


@table("body", NEVER)
def test_it_is_refused_with_its_line_and_what_to_write(tmp_path: Path, body: str) -> None:
    flow(tmp_path, body)
    config = fake_config(tmp_path, "", ["astuner.rollout.workflow=flow.py->Flow"])
    with pytest.raises(ConfigError, match=r"astuner\.task_judge\.judge, or return WorkflowOutput") as refused:
        check_rewards(config)
    assert f"{tmp_path / 'flow.py'}:{LINE}" in str(refused.value)
    check_rewards(
        fake_config(tmp_path, "", ["astuner.rollout.workflow=flow.py->Flow", "astuner.task_judge.judge=flow.py->Flow"])
    )


@table("body", PERHAPS)
def test_what_may_give_a_reward_is_not_refused(tmp_path: Path, body: str) -> None:
    flow(tmp_path, body)
    check_rewards(fake_config(tmp_path, "", ["astuner.rollout.workflow=flow.py->Flow"]))


def test_what_is_decorated_may_get_its_reward_there(tmp_path: Path) -> None:
    flow(tmp_path, "return WorkflowOutput()", before="@logged\n    ")
    assert not never_gives_reward(import_user_code("flow.py->Flow", tmp_path).execute)
    assert not never_gives_reward(print)


def test_config_check_finds_it_and_a_try_out_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flow(tmp_path, "return WorkflowOutput(response=reply)")
    (tmp_path / "train.jsonl").write_text('{"question": "1 + 1?"}\n')
    (tmp_path / "e.yaml").write_text(
        "astuner:\n  model: {path: tiny-calculator}\n  rollout: {workflow: flow.py->Flow}\n"
        "  task_reader: {type: jsonl, jsonl: {training: {file_path: train.jsonl}}}\n"
    )
    codes = {}
    for backbone in ("local", "debug"):
        with pytest.raises(SystemExit) as ended:
            main(["config", "check", str(tmp_path / "e.yaml"), "--backbone", backbone])
        codes[backbone] = ended.value.code
        said = capsys.readouterr()
        assert f"{tmp_path / 'flow.py'}:{LINE}" in " ".join((said.out + said.err).split()), (backbone, said)
    assert codes == {"local": 1, "debug": 0}


@table(
    "rule, judge, says",
    [
        ("judge", None, "scored 0"),
        ("judge", "flow.py->Flow", "judged like all other"),
        ("drop", None, "dropped from training"),
        ("-0.5", None, "scored -0.5"),
        ("0", "flow.py->Flow", "scored 0,"),
    ],
)
def test_the_plan_says_what_an_attempt_is_worth_that_a_limit_ended(
    tmp_path: Path, rule: str, judge: str | None, says: str
) -> None:
    flow(tmp_path, "return WorkflowOutput(reward=1.0)")
    overrides = ["astuner.rollout.workflow=flow.py->Flow", f"astuner.rollout.truncated_reward={rule}"]
    if judge:
        overrides.append(f"astuner.task_judge.judge={judge}")
    (tmp_path / "train.jsonl").write_text('{"question": "1 + 1?"}\n')
    reader = "  task_reader: {type: jsonl, jsonl: {training: {file_path: train.jsonl}}}\n"
    tasks = TaskSet(train=(), validation=())
    plan = make_plan(fake_config(tmp_path, reader, overrides), True, {}, tmp_path, tasks, {})
    assert says in plan.lines["at a limit"]
    assert "astuner.rollout.truncated_reward" in plan.lines["at a limit"]
