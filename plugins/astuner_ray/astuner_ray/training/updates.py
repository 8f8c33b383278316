"""Metrics of a step's updates: values known without the trainer, and the trainer's values under ASTuner's names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from astuner import TrainerCommon
from astuner.contracts.types import Sample
from astuner_objectives.schedule import mean_learning_rate
from astuner_objectives.step import moves_without_advantage

VERL_ACTOR: Mapping[str, str] = {
    "actor/loss": "loss",
    "actor/pg_loss": "pg_loss",
    "actor/entropy": "entropy",
    "actor/kl": "kl",
    "actor/kl/ref": "kl/ref",
    "actor/kl/mismatch_mean": "kl/mismatch_mean",
    "actor/kl/mismatch_max": "kl/mismatch_max",
    "actor/ratio/mean": "ratio/mean",
    "actor/ratio/max": "ratio/max",
    "actor/clip_frac/low": "clip_frac/low",
    "actor/clip_frac/high": "clip_frac/high",
    "actor/rollout_is/weight": "rollout_is/weight",
    "actor/grad_norm": "grad_norm",
    "actor/logit_grad/policy": "logit_grad/policy",
    "actor/logit_grad/kl": "logit_grad/kl",
    "actor/logit_grad/entropy": "logit_grad/entropy",
    "perf/mfu/actor": "perf/mfu",
    "perf/max_memory_allocated_gb": "perf/gpu_memory_gb",
}
"""VERL's metric names for an update with `astuner_ray.training.loss` -> ASTuner's names."""


class Updates:
    """Describe a run's updates."""

    def __init__(self, common: TrainerCommon, *, total_steps: int) -> None:
        """:param total_steps: Training steps of the run."""
        self._common = common
        self._per_step = common.mini_batch_num * common.ppo_epochs
        self._total = total_steps * self._per_step

    @property
    def drops_zero_advantage(self) -> bool:
        """Whether a sample with advantage 0 has no gradient and can be skipped."""
        algorithm = self._common.algorithm
        extra = moves_without_advantage(self._common) or algorithm.use_kl_in_reward
        return algorithm.filter_zero_advantage and not extra

    def metrics(self, step: int, kept: Sequence[Sample], mini_batches: int) -> dict[str, float]:
        """Return the metrics of one update that are known before it runs.

        :param step: Training step, from 1.
        :param kept: Samples that are trained on.
        :param mini_batches: Optimizer steps that each pass over them is cut into.
        """
        common = self._common
        learns = bool(kept) and (any(s.advantage for s in kept) or moves_without_advantage(common))
        if not learns:
            return {"nothing_learnable": 1.0, "tokens/trained": 0.0}
        steps = mini_batches * common.ppo_epochs
        return {
            "nothing_learnable": 0.0,
            "tokens/trained": float(common.ppo_epochs * sum(s.trained_tokens for s in kept)),
            "tokens/raw": float(common.ppo_epochs * sum(len(s.input_ids) for s in kept)),
            "lr": mean_learning_rate(common.optim, (step - 1) * self._per_step, steps, self._total),
        }


def translate(numbers: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, float]:
    """Return an engine's finite metrics under ASTuner's names; metrics of a loss keep the names that it chose.

    :param names: Engine's name -> ASTuner's name.
    """
    of_loss = {name: name.removeprefix("actor/") for name in numbers if name.startswith("actor/loss/")}
    found = {ours: float(numbers[theirs]) for theirs, ours in {**names, **of_loss}.items() if theirs in numbers}
    return {name: value for name, value in found.items() if math.isfinite(value)}
