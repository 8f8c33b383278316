"""What `astuner doctor` says about VERL on machines that are not this one."""

import importlib.metadata
import json

import pytest

from astuner_ray.native import gpu_diagnosis
from astuner_verl import diagnosis

HEADER = "| NVIDIA-SMI 580.95.05    Driver Version: 580.95.05    CUDA Version: 13.0 |"
CARD = "NVIDIA H200, NVL, 580.95.05, 140000, 143771\n"
GOOD = {"torch": "2.11.0+cu130", "vllm": "0.24.0", "flash-attn": "2.8.3", "sglang": None, "astuner-trinity": None}


@pytest.fixture
def machine(monkeypatch):
    """Make a machine: `machine(distribution=version, cards=...)` -> what is found, by what was looked at."""
    real = importlib.metadata.version

    def make(cards=CARD, **versions):
        have = {**GOOD, **{name.replace("_", "-"): found for name, found in versions.items()}}

        def version(name):
            if name not in have:
                return real(name)
            if have[name] is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return have[name]

        monkeypatch.setattr(importlib.metadata, "version", version)
        monkeypatch.setattr(gpu_diagnosis, "nvidia_smi", lambda *arguments: cards if arguments else HEADER)
        return {finding.what: finding for finding in diagnosis.diagnose()}

    return make


def test_a_machine_that_has_everything(machine):
    found = machine()
    assert {f.level for f in found.values()} == {"ok"}
    assert found["NVIDIA driver"].detail == "580.95.05, CUDA up to 13.0; torch 2.11.0+cu130"
    assert found["GPU 0"].detail == "NVIDIA H200, NVL, 136.7 of 140.4 GiB free"


@pytest.mark.parametrize(
    ("versions", "what", "level", "fix"),
    [
        ({"torch": "2.11.0+cpu"}, "verl's torch", "fail", "pip install --force-reinstall 'torch==2.11.0'"),
        ({"torch": None}, "verl's torch", "fail", "pip install 'astuner-verl[vllm]'"),
        ({"vllm": None}, "rollout engine", "fail", "pip install 'astuner-verl[vllm]'"),
        ({"vllm": "0.10.0"}, "vllm", "warn", "pip install 'vllm==0.24.0'"),
        ({"flash_attn": None}, "flash-attn", "warn", "pip install --no-build-isolation 'flash-attn==2.8.3'"),
        ({"ray": None}, "ray", "fail", "pip install astuner-verl"),
        ({"TransferQueue": None}, "TransferQueue", "fail", "pip install astuner-verl"),
        ({"astuner_trinity": "0.1.0"}, "verl and trinity", "fail", "python3 -m venv .venv-verl"),
    ],
)
def test_what_is_missing_or_does_not_fit(machine, versions, what, level, fix):
    finding = machine(**versions)[what]
    assert finding.level == level
    assert finding.fix.startswith(fix)


def test_without_a_gpu_nothing_is_said_of_what_only_gpus_need(machine, monkeypatch):
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    found = machine(cards=None, vllm=None, flash_attn=None, astuner_verl_cpu=None)
    assert found["verl on a CPU"].fix == "pip install astuner-verl-cpu"
    assert {f.what for f in found.values() if f.level != "ok"} == {"verl on a CPU"}


def test_the_doctor_asks_it(capsys):
    from astuner.cli import main

    with pytest.raises(SystemExit):
        main(["doctor", "--json"])
    found = {f["what"]: f for f in json.loads(capsys.readouterr().out)}
    assert found["verl"]["detail"] == importlib.metadata.version("verl")
