"""What `astuner doctor` says about torch and the GPU, on machines that are not this one."""

from __future__ import annotations

from importlib import metadata

import pytest

from astuner_local import diagnosis


def test_a_gpu_that_torch_cannot_use_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "2.13.0+cpu")
    monkeypatch.setattr(diagnosis, "nvidia_smi", lambda *_: "NVIDIA H200, 140000 MiB\n")
    finding = next(f for f in diagnosis.findings() if f.what == "torch")
    assert finding.level == "warn"
    assert finding.fix == "pip install --force-reinstall 'torch==2.13.0'"


def test_a_driver_that_hangs_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(*_: str) -> str:
        raise TimeoutError("nvidia-smi does not answer")

    monkeypatch.setattr(diagnosis, "nvidia_smi", hangs)
    assert diagnosis._nvidia() == ["nvidia-smi does not answer"]
