"""The example experiment, cut short enough for a test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "math_agent" / "math_agent.yaml"

SHORT = (
    "astuner.trainer_common.total_steps=3",
    "astuner.trainer_common.test_freq=100",
    "astuner.data.max_validation_tasks=16",
    "astuner.data.train_batch_size=4",
    "astuner.rollout.num_repeat=4",
    "astuner.trainer_common.ppo_epochs=1",
    "astuner.trainer_common.use_kl_loss=false",
    "astuner.trainer_common.optim.lr_warmup_steps=5",
)


@pytest.fixture
def short(tmp_path: Path) -> Callable[..., list[str]]:
    """Overrides for a run of a few seconds in ``tmp_path``; later ones win."""

    def overrides(*more: str) -> list[str]:
        return [*SHORT, f"astuner.experiment_dir={tmp_path}", "astuner.experiment_name=run", *more]

    return overrides
