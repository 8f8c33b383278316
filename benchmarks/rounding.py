"""Gain of a step in bfloat16, with stochastic rounding and rounding to nearest, compared with float32.

Uses the model of `real_model_speed`.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from astuner import Sample
from astuner.rollout.models import one_model
from benchmarks.local_side import LocalSteps, make_config
from benchmarks.models import load, real_model_folder
from benchmarks.report import Report

LEARNING_RATE, STEPS, NEW = 3e-5, 8, 32
"""Learning rate that `astuner new experiment --model smollm2-135m` writes."""
GROUPS, GROUP_SIZE = 4, 8


def run(*, quick: bool) -> Report:
    import torch

    from astuner_local.trainer.optim import PolicyOptimizer

    torch.set_num_threads(1)
    steps, model, at_random = 2 if quick else STEPS, real_model_folder(), PolicyOptimizer._write_weights
    report = Report(
        "Gain of a step with bfloat16 weights",
        f"{Path(model).resolve().name}, {steps} optimizer steps on one batch: {GROUPS * GROUP_SIZE} answers of {NEW} "
        f"tokens with random advantages of 1 or -1, AdamW at {LEARNING_RATE:g}. The gain is the change of the mean "
        "of an answer's log-probability per token times its advantage.",
    )
    samples, trainer_config = _samples(model)

    @torch.no_grad()
    def to_the_nearest(optimizer: Any) -> None:
        for name, weight in optimizer._weights.items():
            weight.copy_(optimizer._masters[name])

    rows = []
    for what, dtype, write in (
        ("float32", "float32", at_random),
        ("bfloat16, stochastic rounding (ASTuner)", "bfloat16", at_random),
        ("bfloat16, rounding to nearest", "bfloat16", to_the_nearest),
    ):
        PolicyOptimizer._write_weights = write  # type: ignore[method-assign, assignment]
        try:
            gains, seconds = _gains(load(model, dtype)[0], samples, trainer_config, steps)
        finally:
            PolicyOptimizer._write_weights = at_random  # type: ignore[method-assign]
        rows.append((what, *(f"{gain:.3f}" for gain in gains), f"{seconds:.3f}"))
    report.table(("weights", *(f"after {n}" for n in range(1, steps + 1)), "s to write them"), rows)
    return report


def _samples(model: str) -> tuple[list[Sample], Any]:
    """Return answers of the float32 model with random advantages, and the trainer's configuration."""
    with tempfile.TemporaryDirectory() as folder:
        config = make_config(
            Path(folder),
            model,
            workflow="benchmarks.agents->OneTurn",
            groups=GROUPS,
            group_size=GROUP_SIZE,
            max_new_tokens=NEW,
            max_added_tokens=NEW,
        )
        steps = LocalSteps(config, Path(folder), forced=True)
        try:
            rollout = steps.experiment.rollout(one_model(steps.asked, steps.codec), 1)
            samples, _ = steps.experiment.credit(rollout, policy_version=0)
        finally:
            steps.close()
    rng, trainer = random.Random(0), config.astuner.trainer_common
    optim = trainer.optim.model_copy(update={"lr": LEARNING_RATE})
    return [replace(s, advantage=rng.choice((-1.0, 1.0))) for s in samples], trainer.model_copy(update={"optim": optim})


def _gains(model: Any, samples: Sequence[Sample], trainer_config: Any, steps: int) -> tuple[list[float], float]:
    """Return the gain after each step, and the seconds spent on writing the weights."""
    from astuner_local.trainer.trainer import PolicyTrainer

    trainer = PolicyTrainer(model, trainer_config, temperature=1.0, device="cpu", total_optimizer_steps=steps)
    advantages = np.array([sample.advantage for sample in samples])

    def score() -> float:
        return float(np.mean(advantages * [found.mean() for found in trainer.logprobs(samples)]))

    before, gains = score(), []
    for _ in range(steps):
        trainer.update(samples)
        gains.append(score() - before)
    started = time.process_time()
    trainer.optimizer._write_weights()
    return gains, time.process_time() - started
