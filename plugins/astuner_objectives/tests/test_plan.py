"""What the plan says of disk and speed: computed, or measured by somebody, or said to be neither."""

from __future__ import annotations

import datetime
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from astuner import Config
from astuner.config.loading import load_config
from astuner.contracts.errors import ConfigError
from astuner_objectives import plan
from astuner_objectives.plan import SPEEDS, disk_plan, read_speeds, speed_plan

MIB = 2**20
SHIPPED = Path(plan.__file__).with_name("speeds.yaml")
ROW = """
- backbone: verl
  model: mine
  parameters: 500_000_000
  device: h100
  rollout: 9000
  train: 20000
  setting: bf16
  date: 2026-11-27
  commit: abc1234
  command: mine.sh
"""


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    (tmp_path / "e.yaml").write_text(f"astuner: {{model: {{path: m}}, experiment_dir: {tmp_path}/not/there/yet}}")

    def line(*overrides: str, free: int = 10**12) -> str:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
        config: Config = load_config(tmp_path / "e.yaml", [f"astuner.trainer_common.{o}" for o in overrides])
        return disk_plan(config, checkpoint=10 * MIB, state=30 * MIB)["disk"]

    return line


def test_what_stays_at_once_is_summed_up_and_what_is_free_said(planned: Callable[..., str], tmp_path: Path) -> None:
    for overrides, stay, most in (
        ((), "at most 4", "110 MiB"),  # three and the best, a new one, two states
        (("max_checkpoints=1",), "at most 2", "90 MiB"),
        (("total_steps=100", "save_freq=50"), "at most 2", "90 MiB"),
        (("total_steps=101", "save_freq=50"), "at most 3", "100 MiB"),
        (("total_steps=7", "save_freq=never"), "at most 1", "80 MiB"),
        (("max_checkpoints=null",), "all", "80 MiB after the first"),
    ):
        text = planned(*overrides)
        assert text.startswith(f"10 MiB per checkpoint ({stay} kept) and 30 MiB to resume; at most {most}"), text
        assert text.endswith(f"931.3 GiB free in {tmp_path}")


def test_a_disk_that_is_too_small_is_refused(planned: Callable[..., str]) -> None:
    for overrides, enough in ((), 110), (("max_checkpoints=1",), 90), (("total_steps=7", "save_freq=never"), 80):
        planned(*overrides, free=enough * MIB)
        with pytest.raises(ConfigError, match=r"not enough disk space.*max_checkpoints.* astuner\.experiment_dir"):
            planned(*overrides, free=enough * MIB - 1)


def test_what_a_resumed_run_has_on_the_disk_needs_no_new_space(planned: Callable[..., str], tmp_path: Path) -> None:
    checkpoints, resume = (tmp_path / "not/there/yet/e" / name for name in ("checkpoints/step-000001", "resume"))
    for folder in (checkpoints, resume):
        folder.mkdir(parents=True)
    (checkpoints / "model.safetensors").write_bytes(bytes(10 * MIB))
    (resume / "state").write_bytes(bytes(5 * MIB))
    (resume / "model.safetensors").hardlink_to(checkpoints / "model.safetensors")
    planned(free=95 * MIB)
    with pytest.raises(ConfigError):
        planned(free=95 * MIB - 1)


def test_speeds_are_those_that_somebody_measured_near_enough_or_none(tmp_path: Path) -> None:
    own = tmp_path / "mine.yaml"
    own.write_text(ROW + ROW.replace("500_", "900_").replace("mine\n", "larger\n"))

    def told(backbone: str, parameters: float, device: str, gpus: int = 1) -> str:
        environ = {SPEEDS: str(own)}
        plan = speed_plan(backbone, parameters=parameters, device=device, gpus=gpus, environ=environ)
        return plan.get("tokens per second", "")

    h100 = "NVIDIA H100 80GB HBM3"
    assert told("verl", 494e6, h100).startswith(
        "about 9,000 generated tokens/s during rollout and 20,000 during the update, measured with mine, bf16 ("
    )
    assert "with larger, bf16 (2026-11-27, commit abc1234: mine.sh)" in told("verl", 800e6, h100)
    assert "smollm2-135m-float32" in told("local", 134_515_008, "cpu")
    for unlike in (("verl", 630e6, h100), ("verl", 494e6, h100, 2), ("verl", 494e6, "cpu"), ("trinity", 494e6, h100)):
        assert told(*unlike) == ""


def test_a_file_of_speeds_that_is_wrong_is_refused_with_its_row_and_key(tmp_path: Path) -> None:
    own = tmp_path / "mine.yaml"
    for text, says in (
        (ROW.replace("rollout: 9000", "rollout: fast"), "row 0.rollout"),
        (ROW + ROW.replace("commit: abc1234", "kommit: abc1234"), "row 1.commit"),
        ("rows: {}", "row "),
        ("- [", "not a YAML file of speeds"),
    ):
        own.write_text(text)
        with pytest.raises(ConfigError, match=says) as refused:
            read_speeds(own)
        assert str(own) in str(refused.value)
    with pytest.raises(ConfigError, match=r"ASTUNER_SPEEDS names .*nowhere"):
        read_speeds(tmp_path / "nowhere")


def test_shipped_rows_are_whole_and_none_stands_twice() -> None:
    rows = read_speeds(SHIPPED)
    assert len({(r.backbone, r.model, r.device, r.gpus) for r in rows}) == len(rows) > 0
    assert all(datetime.date(2026, 1, 1) <= row.date <= datetime.date.today() for row in rows)
