"""``astuner config``: show, check, explain and schema."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from astuner import ConfigError, load_config
from astuner.cli import app
from astuner.plugins.loader import load_plugins
from astuner_debug.explain_command import find_key, json_schema
from tests.table import table

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
    result = CliRunner().invoke(app, ["config", *arguments])
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
        "command line: astuner.trainer_common.nnodes: the backbone",
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
    assert "no mistake; 1 tasks to train on, 0 to validate on" in said
    told = json.loads(run(*known, "--json"))
    assert (told["backbone"], told["mistakes"], told["not_checked"]) == ("debug", [], [])
    assert "no such file" in json.loads(run("check", "f.yaml", "--json", code=1))["mistakes"][0]


def test_explain_says_meaning_type_default_value_origin_and_backbones():
    info = find_key("rollout.num_repeat", load_plugins(), load_config("e.yaml"))
    assert (info.key, info.doc) == ("astuner.rollout.num_repeat", "Episodes per task: the GRPO group size.")
    assert (info.type, info.default, info.value, info.origin) == ("integer ≥ 1, ≤ 100,000", 8, 4, "e.yaml:3:40")
    assert "local" in info.honoured_by
    assert {"debug", "local"} <= set(find_key("rollout.temperature", load_plugins()).honoured_by)
    implied = find_key("astuner.trainer_common.algorithm.clip_ratio_high", load_plugins(), load_config("e.yaml"))
    assert (implied.value, implied.origin) == (0.28, "implied by algorithm.loss: dapo")
    assert "debug" not in find_key("trainer_common.total_epochs", load_plugins()).honoured_by


def test_keys_below_a_section_that_is_not_open_are_known_or_wrong():
    for closed in ("local.actor", "debug.actor", "verlx.actor"):
        with pytest.raises(ConfigError, match="there is no key"):
            find_key(closed, load_plugins())


def test_explain_knows_sections_plugins_keys_and_older_ones():
    assert "lr" in find_key("trainer_common.optim", load_plugins()).keys
    assert "training" in find_key("task_reader.jsonl", load_plugins()).keys
    assert find_key("task_reader.jsonl.training.file_path", load_plugins()).required
    assert find_key("astuner", load_plugins()).type == "section"
    with pytest.raises(ConfigError, match=r"is now astuner.rollout.workflow; try: astuner config explain"):
        find_key("rollout.user_workflow", load_plugins())
    with pytest.raises(ConfigError, match="was removed"):
        find_key("context_tracker", load_plugins())
    with pytest.raises(ConfigError, match=r"did you mean astuner.rollout.temperature\?"):
        find_key("rollout.temprature", load_plugins())


@table(
    ("typed", "meant"),
    [
        ("loss_agg_mode", "astuner.trainer_common.algorithm.loss_agg_mode"),
        ("optim.lr", "astuner.trainer_common.optim.lr"),
        ("training.file_path", "astuner.task_reader.jsonl.training.file_path"),
        ("optim", "astuner.trainer_common.optim"),
        ("seed", "astuner.seed"),
        ("model.path", "astuner.model.path"),
    ],
)
def test_the_end_of_a_key_is_enough(typed: str, meant: str):
    assert find_key(typed, load_plugins()).key == meant


def test_the_end_of_several_keys_lists_them_and_that_of_an_older_one_says_todays():
    with pytest.raises(ConfigError) as e:
        find_key("temperature", load_plugins(["flywheel", "rubrics"]))  # which have such keys too
    assert str(e.value) == (
        "2 keys end with temperature; use one of: astuner.rollout.temperature, astuner.rollout.val_kwargs.temperature"
    )
    with pytest.raises(ConfigError, match=r"judge_protocol is now astuner\.task_judge\.judge;"):
        find_key("judge_protocol", load_plugins())


def test_explain_on_the_command_line():
    text = run("explain", "rollout.num_repeat", "e.yaml")
    assert "the GRPO group size." in text
    assert "here: 4  (e.yaml:3:40)" in text
    assert json.loads(run("explain", "model.path", "--json"))["required"] is True
    assert "keys: rank" in run("explain", "model.lora")


def test_the_schema_describes_every_key_and_its_references_resolve():
    schema = json.loads(run("schema"))
    assert schema == json.loads(json.dumps(json_schema(load_plugins()), default=str))

    def follow(node: dict) -> dict:
        return schema["$defs"][node["$ref"].removeprefix("#/$defs/")] if "$ref" in node else node

    def references(node: object):
        if isinstance(node, dict):
            yield from [node["$ref"]] if "$ref" in node else []
            node = list(node.values())
        if isinstance(node, list):
            for below in node:
                yield from references(below)

    found = set(references(schema))
    assert found
    assert {ref.removeprefix("#/$defs/") for ref in found} <= set(schema["$defs"])
    astuner = follow(schema["properties"]["astuner"])
    rollout = follow(astuner["properties"]["rollout"])
    assert rollout["properties"]["num_repeat"]["description"].startswith("Episodes per task")
    assert rollout["properties"]["user_workflow"]["deprecated"] is True
    readers = follow(astuner["properties"]["task_reader"])["properties"]
    assert "training" in follow(readers["jsonl"])["properties"]
    assert "training_split" in follow(readers["env_service"])["properties"]
    assert astuner["additionalProperties"] is False
