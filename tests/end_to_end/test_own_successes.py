"""What an agent did well, as its exact tokens, is what the next run begins with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "math_agent" / "math_agent.yaml"
SMALL = (
    "astuner.data.train_batch_size=4",
    "astuner.trainer_common.val_before_train=false",
    "astuner.trainer_common.use_kl_loss=false",
    "astuner.trainer_common.algorithm.use_kl_in_reward=false",
)


def astuner(*arguments: str, cwd: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "astuner", *arguments], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_run_starts_warm_from_the_episodes_of_another(tmp_path: Path) -> None:
    run = ("run", str(EXAMPLE), "--backbone", "local", *SMALL)
    astuner(*run, "--steps", "3", "--run-dir", "first", cwd=tmp_path)
    astuner("export", "first", "--to", "tokens", "--out", "good.jsonl", cwd=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "good.jsonl").read_text().splitlines()]
    assert lines
    assert all(line["reward"] == 1 for line in lines)

    warm = (f"local.warm_start.file={tmp_path / 'good.jsonl'}", "local.warm_start.steps=4")
    astuner(*run, *warm, "local.warm_start.lr=1e-3", "--steps", "5", "--run-dir", "second", cwd=tmp_path)
    losses = [row["warm_start/loss"] for row in metrics(tmp_path / "second") if "warm_start/loss" in row]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert sum("reward/mean" in row for row in metrics(tmp_path / "second")) == 1
