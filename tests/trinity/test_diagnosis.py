"""What `astuner doctor` says about Trinity where it is installed; others are in plugins/astuner_trinity/tests."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest

from astuner import load_config
from astuner.cli import main
from astuner_trinity.facts import platform
from astuner_trinity.native import Facts, compose


def test_what_works_without_flash_attention_is_taken_by_the_conversion(tmp_path: Path) -> None:
    """It is not installed here."""
    (tmp_path / "x.yaml").write_text(
        "astuner:\n  model: {path: tiny-calculator}\n  rollout: {workflow: 'a.py->A', max_model_len: 256}\n"
        "  task_reader: {type: jsonl, jsonl: {training: {file_path: t.jsonl}}}\n"
    )
    config = load_config(tmp_path / "x.yaml", backbone="trinity")
    trainer = compose(Facts.of(config, total_steps=2, gpus=2), platform({}).settings).values["trainer"]
    assert trainer["trainer_config"]["model"]["override_config"] == {"attn_implementation": "sdpa"}
    assert trainer["use_remove_padding"] is False


def test_the_doctor_asks_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "--json"])
    found = {f["what"]: f for f in json.loads(capsys.readouterr().out)}
    for name in ("trinity-rft", "verl"):
        assert (found[name]["level"], found[name]["detail"]) == ("ok", importlib.metadata.version(name))
    assert found["numpy"]["level"] == "ok"
