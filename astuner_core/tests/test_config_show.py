"""``astuner config``: show and check."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from astuner import load_config
from astuner.cli.config import app

TEXT = """\
astuner:
  model: {path: m}
  rollout: {agentscope_workflow: a->B, num_repeat: 4}
  trainer_common:
    logger:
      - console
    algorithm: {loss: dapo}
  task_reader:
    type: jsonl_dataset_file
    jsonl_dataset_file: {training: {file_path: "data # not a comment.jsonl"}}
"""


@pytest.fixture(autouse=True)
def _file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("e.yaml").write_text(TEXT, encoding="utf-8")


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


def test_show_prints_what_loads_again():
    shown = yaml.safe_load(run("show", "e.yaml", "astuner.seed=7"))
    assert shown["astuner"]["seed"] == 7
    Path("again.yaml").write_text(yaml.safe_dump(shown))
    assert load_config("again.yaml").as_dict() == shown
    assert json.loads(run("show", "e.yaml", "--json"))["astuner"]["rollout"]["num_repeat"] == 4
    both = json.loads(run("show", "e.yaml", "--json", "--origin", "--backbone", "local"))
    assert both["astuner.backbone"] == {"value": "local", "origin": "--backbone"}


def test_show_origin_puts_each_keys_origin_beside_it():
    config = load_config("e.yaml", ["astuner.seed=7"])
    text = run("show", "e.yaml", "astuner.seed=7", "--origin")
    assert yaml.safe_load(text) == config.as_dict()
    lines = {line.partition("#")[0].strip(): line.rpartition("# ")[2] for line in text.splitlines()}
    assert lines["seed: 7"] == "command line"
    assert lines["num_repeat: 4"] == "e.yaml:3:40"
    assert lines["workflow: a->B"] == "e.yaml:3:13"
    assert lines["top_k: -1"] == "default"
    assert lines["loss_agg_mode: token-mean"] == "implied by algorithm.loss: dapo"
    assert lines["logger:"] == "e.yaml:5:5"
    assert run("show", "e.yaml", "--origin").startswith("astuner:\n")


def test_check_prints_notes_and_refuses_what_cannot_work():
    pytest.importorskip("astuner_local")
    overrides = ["astuner.trainer_common.nnodes=2", "astuner.rollout.x=2", "astuner.model.path=./m"]
    said = run("check", "e.yaml", *overrides, "--backbone", "local", code=1)
    for mistake in (
        "e.yaml:3:13: astuner.rollout.workflow: 'a->B': no module a",
        "command line: astuner.trainer_common.nnodes: 2 is not possible",
        "command line: unknown key astuner.rollout.x",
        "command line: astuner.model.path is ./m, but there is no such folder",
        "cannot read the train tasks in data # not a comment.jsonl",
        "e.yaml with the backbone 'local': 5 mistakes",
    ):
        assert mistake in said, said
    Path("a.py").write_text("class B:\n    async def execute(self, task, model): ...\n")
    Path("data # not a comment.jsonl").write_text('{"question": "2 + 2?"}\n')
    known = ("check", "e.yaml", "astuner.model.path=tiny-calculator")
    said = run(*known, "--backbone", "local")
    assert "is now astuner.rollout.workflow" in said
    assert "no mistake; 1 tasks to train on, 0 held out" in said
    told = json.loads(run(*known, "--json"))
    assert (told["backbone"], told["mistakes"], told["not_checked"]) == ("debug", [], [])
    assert "no such file" in json.loads(run("check", "f.yaml", "--json", code=1))["mistakes"][0]
