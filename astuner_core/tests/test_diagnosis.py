"""`astuner doctor` asks the plugins too, and survives those that break."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace

import pytest

from astuner import Provider
from astuner.cli import doctor
from astuner.contracts import diagnosis
from astuner.contracts.diagnosis import Finding, nvidia_smi
from tests.table import table


def healthy():
    yield Finding(level="ok", what="driver", detail="1.0")
    yield Finding(level="fail", what="engine", detail="not installed", fix="pip install engine")


def broken():
    raise ZeroDivisionError("of mine")


def manager(**targets):
    plugin = SimpleNamespace(dist="astuner-acme")
    offers = [(plugin, name, Provider(target=f"{__name__}:{target}")) for name, target in targets.items()]
    return SimpleNamespace(offers=lambda kind: iter(offers) if kind == "diagnosis" else iter(()))


def test_findings_of_plugins_are_shown_whatever_becomes_of_another():
    found = list(doctor._of_plugins(manager(bad="broken", gone="no_such", good="healthy"), {}))
    assert [(f.what, f.level) for f in found] == [
        ("bad", "warn"), ("gone", "warn"), ("driver", "ok"), ("engine", "fail"),
    ]  # fmt: skip
    assert found[0].detail == "the diagnosis of astuner-acme failed: ZeroDivisionError: of mine"
    assert found[0].fix == "pip install --upgrade astuner-acme"
    assert "has no 'no_such'" in found[1].detail


@table(
    ("script", "answer"), [("echo $1", "--query\n"), ("echo no devices; exit 9", None), (None, None)]
)
def test_nvidia_smi(tmp_path, monkeypatch, script, answer):
    monkeypatch.setenv("PATH", str(tmp_path))
    if script is not None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    assert nvidia_smi("--query") == answer


def test_a_driver_that_hangs_is_not_taken_for_none(monkeypatch):
    def hangs(command, **_):
        raise subprocess.TimeoutExpired(command, 20)

    monkeypatch.setattr(diagnosis.shutil, "which", lambda name: name)
    monkeypatch.setattr(diagnosis.subprocess, "run", hangs)
    with pytest.raises(TimeoutError, match="nvidia-smi does not answer"):
        nvidia_smi("--query")
