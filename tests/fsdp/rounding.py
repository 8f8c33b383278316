"""Passes and rollouts in bfloat16, on either engine: rollout and trainer differ, by no more than the page says."""

from __future__ import annotations

from pathlib import Path

from .runs import MATH_AGENT, running

MOST = {"kl/mismatch_mean": 0.01, "kl/mismatch_max": 0.5}
"""Nats in any step; `docs/backbones/verl.md` says so, too."""


def check_rounding_is_corrected(backbone: str, folder: Path) -> None:
    common = "astuner.trainer_common"
    more = [
        "astuner.model.dtype=bfloat16",
        "astuner.data.train_batch_size=4",
        "astuner.rollout.num_repeat=4",
        f"{common}.ppo_epochs=2",
        f"{common}.use_kl_loss=false",
        f"{common}.total_steps=4",
        f"{common}.test_freq=4",
        f"{common}.save_freq=4",
        f"{common}.val_before_train=false",
        "astuner.data.max_validation_tasks=4",
    ]
    with running(backbone, MATH_AGENT, folder / "run", "--no-resume", *more) as run:
        assert run.ends() == 0, run.said()
    assert "correction " in run.said(), "the plan says so"
    steps = run.steps().values()
    print("\n", backbone, [(row["kl/mismatch_mean"], row["kl/mismatch_max"]) for row in steps])
    for name, most in MOST.items():
        assert 1e-5 < max(row[name] for row in steps) < most, name
    assert all(0.99 < row["rollout_is/weight"] < 1.01 for row in steps)
    certificate = run.certificate()
    assert certificate["continued_exactly_share"] == certificate["tokens"]["trained_share"] == 1
