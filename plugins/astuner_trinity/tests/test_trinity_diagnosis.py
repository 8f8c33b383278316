"""What `astuner doctor` says about Trinity, on machines that are not this one; Trinity is not needed."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from astuner import Provider
from astuner.contracts.diagnosis import Finding
from astuner.plugins import registry
from astuner.plugins.loader import load_plugins
from astuner_ray.native import gpu_diagnosis
from astuner_trinity import diagnosis
from astuner_trinity.diagnosis import INSTALL, INSTALL_ENGINE
from tests.table import table

ROOT = Path(__file__).resolve().parents[3]
HEADER = "| NVIDIA-SMI 580.95.05    Driver Version: 580.95.05    CUDA Version: 13.0 |"
CARD = "NVIDIA H200, 580.95.05, 140000, 143771\n"
GOOD = {
    "trinity-rft": "0.6.0",
    "verl": "0.8.0",
    "ray": "2.60.0",
    "numpy": "2.4.6",
    "pyarrow": "25.0.1",
    "torch": "2.11.0+cu130",
    "vllm": "0.23.0",
    "flash-attn": "2.8.3",
}
REQUIRES = {
    "astuner-trinity": [
        "pyarrow<26,>=19",
        "ray[default]>=2.50",
        "trinity-rft==0.6.0",
        "verl==0.8.0",
        'vllm<=0.23.0,>=0.22; extra == "vllm"',
    ],
    "trinity-rft": ["verl>=0.7.1", 'flash-attn>=2.8.3; extra == "flash-attn"'],
    "vllm": ["torch==2.11.0"],
}
Machine = Callable[..., Mapping[str, Finding]]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Make a machine: `machine(distribution=version, cards=...)` -> what is found, by what was looked at."""

    def make(cards: str | None = CARD * 2, **versions: str | None) -> Mapping[str, Finding]:
        installed = {**GOOD, **{name.replace("_", "-"): found for name, found in versions.items()}}

        def version(name: str) -> str:
            found = installed.get(name)
            if found is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return found

        def requires(name: str) -> list[str]:
            if installed.get(name, "0.1.0") is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return REQUIRES.get(name, [])

        def nvidia_smi(*arguments: str) -> str | None:
            return cards if arguments else HEADER

        monkeypatch.setattr(importlib.metadata, "version", version)
        monkeypatch.setattr(importlib.metadata, "requires", requires)
        monkeypatch.setattr(gpu_diagnosis, "nvidia_smi", nvidia_smi)
        return {finding.what: finding for finding in diagnosis.diagnose()}

    return make


def test_a_machine_that_has_everything(machine: Machine) -> None:
    found = machine()
    assert {f.level for f in found.values()} == {"ok"}
    looked_at = {"trinity-rft", "verl", "ray", "numpy", "vllm", "flash-attn"}
    assert found.keys() == looked_at | {"NVIDIA driver", "trinity's GPUs", "GPU 0", "GPU 1"}


@table(
    ("versions", "what", "level", "fix"),
    [
        ({"verl": "0.9.1"}, "verl", "fail", "pip install 'verl==0.8.0' && pip install 'numpy>=2'"),
        ({"verl": "0.7.1"}, "verl", "fail", "pip install 'verl==0.8.0'"),
        ({"verl": None}, "verl", "fail", "pip install 'verl==0.8.0'"),
        ({"trinity_rft": "0.6.1"}, "trinity-rft", "fail", "pip install 'trinity-rft==0.6.0'"),
        ({"trinity_rft": None}, "trinity-rft", "fail", "pip install 'trinity-rft==0.6.0'"),
        ({"ray": None}, "ray", "fail", "pip install 'ray>=2.50'"),
        ({"astuner_verl": "0.1.0"}, "trinity and verl", "fail", "python3 -m venv .venv-trinity"),
        ({"numpy": "1.26.4"}, "numpy", "warn", "pip install 'numpy>=2'"),
        ({"numpy": "1.26.4", "pyarrow": "26.0.1"}, "numpy", "fail", "pip install 'numpy>=2' 'pyarrow<26,>=19'"),
        ({"vllm": None}, "vllm", "fail", INSTALL_ENGINE),
        ({"vllm": "0.21.3"}, "vllm", "fail", INSTALL_ENGINE),
        ({"vllm": "0.24.0"}, "vllm", "warn", INSTALL_ENGINE),
        ({"torch": "2.12.0+cpu"}, "trinity's torch", "fail", "pip install --force-reinstall 'torch==2.11.0'"),
        ({"torch": None}, "trinity's torch", "fail", INSTALL),
        ({"flash_attn": None}, "flash-attn", "warn", "pip install --no-build-isolation 'flash-attn>=2.8.3'"),
        ({"cards": CARD}, "trinity's GPUs", "warn", "astuner run FILE --backbone verl"),
    ],
)
def test_what_is_missing_or_does_not_fit(
    machine: Machine, versions: Mapping[str, Any], what: str, level: str, fix: str
) -> None:
    found = machine(**versions)
    assert {f.what: f.level for f in found.values() if f.level != "ok"} == {what: level}
    assert found[what].fix.startswith(fix)


@table(
    "versions",
    [
        {"vllm": "0.22.1"},
        {"vllm": "0.23.0+cu129"},
        {"numpy": "1.26.4", "vllm": None, "cards": None},  # what a trial on a CPU has
        {"pyarrow": "26.0.1"},
    ],
)
def test_what_fits(machine: Machine, monkeypatch: pytest.MonkeyPatch, versions: Mapping[str, Any]) -> None:
    monkeypatch.setenv("TRINITY_PLATFORM", "cpu")
    assert {f.level for f in machine(astuner_trinity_cpu="0.1.0", **versions).values()} == {"ok"}


def test_why_a_version_is_needed_is_said(machine: Machine) -> None:
    found = machine(verl="0.9.1", vllm="0.21.0")
    assert found["verl"].detail == "0.9.1, but verl==0.8.0 is needed: " + diagnosis.WHY["verl"]
    assert found["vllm"].detail.startswith("0.21.0, but vllm<=0.23.0,>=0.22 is needed: ")


@table(("platform", "what", "level"), [("", "trinity's GPU", "warn"), ("cpu", "trinity on a CPU", "fail")])
def test_without_a_gpu(machine: Machine, monkeypatch: pytest.MonkeyPatch, platform: str, what: str, level: str) -> None:
    monkeypatch.setenv("TRINITY_PLATFORM", platform)
    found = machine(cards=None, vllm=None)
    assert {f.what: f.level for f in found.values() if f.level != "ok"} == {what: level}
    assert "pip install astuner-trinity-cpu" in found[what].fix


def _offered(kind: str) -> Provider:
    return next(offered for plugin, _, offered in load_plugins().offers(kind) if plugin.name == "trinity")


def test_what_is_typed_for_the_engine_is_what_the_package_asks_for() -> None:
    declared = re.search(r'^vllm = \["(.+)"\]$', (ROOT / "plugins/astuner_trinity/pyproject.toml").read_text(), re.M)
    assert declared is not None
    typed = f'pip install "{declared[1]}" "numpy>=2"'
    assert typed == INSTALL_ENGINE
    assert _offered("backbone").install.startswith(INSTALL)
    assert typed in (ROOT / "docs/backbones/trinity.md").read_text(encoding="utf-8")


def test_the_doctor_is_given_it(machine: Machine) -> None:
    machine()
    assert {finding.level for finding in registry.import_target(_offered("diagnosis").target)()} == {"ok"}
