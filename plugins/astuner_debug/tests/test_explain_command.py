"""``astuner config explain`` and ``astuner config schema``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from astuner import ConfigError, load_config
from astuner.cli import main
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


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as e:
        main(["config", *arguments])
    assert not e.value.code
    return capsys.readouterr().out


def test_explain_says_meaning_type_default_value_origin_and_backbones():
    info = find_key("rollout.num_repeat", load_plugins(), load_config("e.yaml"))
    assert (info.key, info.doc) == ("astuner.rollout.num_repeat", "Episodes per task: the GRPO group size.")
    assert (info.type, info.default, info.value, info.origin) == ("whole number ≥ 1", 8, 4, "e.yaml:3:40")
    assert "local" in info.honoured_by
    assert {"debug", "local"} <= set(find_key("rollout.temperature", load_plugins()).honoured_by)
    implied = find_key("astuner.trainer_common.algorithm.clip_ratio_high", load_plugins(), load_config("e.yaml"))
    assert (implied.value, implied.origin) == (0.28, "implied by algorithm.loss: dapo")
    assert "debug" not in find_key("trainer_common.total_epochs", load_plugins()).honoured_by


def test_keys_below_an_open_section_of_a_plugin_are_free():
    info = find_key("verl.actor_rollout_ref.rollout.gpu_memory_utilization", load_plugins())
    assert (info.type, info.doc) == (
        "anything",
        "The ``verl:`` or ``trinity:`` section of an experiment file: the engine's own keys, spelled as it spells "
        "them. They win over what ASTuner would have told it.",
    )
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
    with pytest.raises(ConfigError, match="is not a key any more"):
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
        "2 keys end in temperature; write one of them: "
        "astuner.rollout.temperature, astuner.rollout.val_kwargs.temperature"
    )
    with pytest.raises(ConfigError, match=r"judge_protocol is now astuner\.task_judge\.judge;"):
        find_key("judge_protocol", load_plugins())


def test_explain_on_the_command_line(capsys: pytest.CaptureFixture[str]):
    text = run(capsys, "explain", "rollout.num_repeat", "e.yaml")
    assert "the GRPO group size." in text
    assert "here: 4  (e.yaml:3:40)" in text
    assert json.loads(run(capsys, "explain", "model.path", "--json"))["required"] is True
    assert "keys: rank" in run(capsys, "explain", "model.lora")


def test_the_schema_describes_every_key_and_its_references_resolve(capsys: pytest.CaptureFixture[str]):
    schema = json.loads(run(capsys, "schema"))
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
    assert "math_answer" in follow(astuner["properties"]["task_judge"])["properties"]
    assert "training" in follow(follow(astuner["properties"]["task_reader"])["properties"]["jsonl"])["properties"]
    assert astuner["additionalProperties"] is False
