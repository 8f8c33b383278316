"""What is not on this machine and cannot be downloaded is refused at once, and what is here is named."""

import re
import socket
import subprocess
import sys
import time

import pytest
from huggingface_hub import constants

from astuner import load_config
from astuner.contracts.backbone import Capabilities
from astuner.contracts.errors import RunError
from astuner_models import hub

LOADS_MODELS = Capabilities(honours=frozenset({"model"}))
NOBODY = "http://127.0.0.1:9"
"""The discard port: a connection is refused at once."""


@pytest.fixture(autouse=True)
def no_hub(tmp_path, monkeypatch):
    """A hub that does not answer, and an empty cache."""
    monkeypatch.setattr(constants, "ENDPOINT", NOBODY)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # so that what the code sets is taken back
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    for proxy in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(proxy, raising=False)
        monkeypatch.delenv(proxy.lower(), raising=False)
    hub._connect.cache_clear()


def experiment(folder, model="Qwen/Qwen2.5-0.5B-Instruct"):
    file = folder / "e.yaml"
    reader = "task_reader: {type: huggingface, huggingface: {dataset_path: openai/gsm8k, name: main}}"
    file.write_text(f"astuner:\n  model: {{path: {model}}}\n  {reader}\n  rollout: {{workflow: w.py->W}}\n")
    return load_config(file, backbone="local")


def test_models_and_data_are_refused_together_each_with_its_place_and_what_is_here(tmp_path):
    with pytest.raises(RunError) as refused:
        hub.Downloads().require(experiment(tmp_path), LOADS_MODELS)
    model, data = str(refused.value).splitlines()
    unreachable = f"which is not on this machine, and {NOBODY} cannot be reached (Connection refused)"
    assert model.startswith(f"{tmp_path}/e.yaml:2:11: astuner.model.path is Qwen/Qwen2.5-0.5B-Instruct, {unreachable}")
    assert re.search(r"local model \((.*, )?tiny-calculator\)", model)
    key = "astuner.task_reader.huggingface.dataset_path is openai/gsm8k"
    assert data.startswith(f"{tmp_path}/e.yaml:3:50: {key}, {unreachable}")


def test_a_backbone_with_a_model_of_its_own_is_not_refused_one(tmp_path):
    with pytest.raises(RunError) as refused:
        hub.Downloads().require(experiment(tmp_path), Capabilities())
    assert "model.path" not in str(refused.value)


def test_a_misspelt_name_gets_the_right_one():
    assert "; did you mean tiny-calculator?" in hub.why_no_model("tiny-calculater")


def test_a_model_of_ours_names_the_package_that_is_missing():
    assert hub.why_no_model("smollm2-135m").endswith("package astuner-smollm2. Install it: pip install astuner-smollm2")


def test_what_was_downloaded_is_taken_from_the_cache_without_asking_again(tmp_path, monkeypatch):
    for folder in ("hub/models--Qwen--Qwen2.5-0.5B-Instruct/snapshots", "datasets/openai___gsm8k"):
        (tmp_path / folder).mkdir(parents=True)
    hub.Downloads().require(experiment(tmp_path), LOADS_MODELS)
    assert constants.HF_HUB_OFFLINE  # or else its client would try for half a minute before it looks there
    assert "tiny-calculator, Qwen/Qwen2.5-0.5B-Instruct)" in hub.why_no_model("another/model")


def test_folders_need_no_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    for path in ("mine", "./misspelt", "/nowhere", "~/x", "a/b/c"):
        assert hub.why_no_model(path) == "", "whoever reads it says what is wrong with it"


def test_a_hub_that_answers_is_left_to_its_client(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert hub.why_no_model("Qwen/Qwen2.5-0.5B-Instruct") == ""


def test_behind_a_proxy_it_is_the_proxy_that_must_answer(monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.invalid")
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert hub.why_no_model("Qwen/Qwen2.5-0.5B-Instruct") == ""


def test_a_network_that_swallows_everything_is_given_up(monkeypatch):
    def silence(*_):
        time.sleep(1)
        raise OSError

    monkeypatch.setattr(hub, "PATIENCE", 0.2)
    monkeypatch.setattr(socket, "create_connection", silence)
    assert f"{NOBODY} cannot be reached (no answer within 0.2 s)" in hub.why_no_model("a/b")


def test_whoever_forbids_the_network_is_told_so(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in hub.why_no_model("a/b")


def test_a_run_is_refused_before_anything_heavy_is_imported(tmp_path):
    experiment(tmp_path)
    code = (
        "import sys; from astuner.runs.launch import run\n"
        "try: run(sys.argv[1], backbone='local')\n"
        "except Exception as e: print(e)\n"
        "print(sorted({'torch', 'transformers', 'agentscope', 'datasets'} & set(sys.modules)))"
    )
    environment = {"HF_ENDPOINT": NOBODY, "HF_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    line = [sys.executable, "-c", code, str(tmp_path / "e.yaml")]
    told = subprocess.run(line, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=60)
    assert told.returncode == 0, told.stderr
    *refusals, imported = told.stdout.splitlines()
    assert len(refusals) == 2
    assert imported == "[]"
