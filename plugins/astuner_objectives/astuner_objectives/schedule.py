"""The learning rate of each optimizer step, defined once for all backbones.

A training step has at most ``n = mini_batch_num * ppo_epochs`` optimizer steps. Optimizer step ``i`` of training step
``s`` (both from 0) has the position ``s * n + i`` in the schedule, also if earlier training steps took fewer optimizer
steps or none.

Invariant: the rate depends only on the settings and that position. The schedule therefore ends with the run, and a
resumed run continues it without further state.
"""

from __future__ import annotations

import math

from astuner import Optim
from astuner.contracts.errors import ConfigError


def mean_learning_rate(config: Optim, first: int, steps: int, total_steps: int | None) -> float:
    """Return the mean rate of ``steps`` optimizer steps starting at position ``first``, as shown in metrics.

    :raises ConfigError: As `learning_rate`.
    """
    return sum(learning_rate(config, first + i, total_steps) for i in range(steps)) / steps


def learning_rate(config: Optim, step: int, total_steps: int | None) -> float:
    """Return the rate at a position: linear warm-up from 0, then constant, linear or cosine decay.

    :param step: Position in the schedule, from 0.
    :param total_steps: Positions in the run's schedule, including the warm-up.
    :raises ConfigError: A decaying schedule has no `total_steps`.
    """
    warmup = config.lr_warmup_steps
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.lr_scheduler == "constant":
        return config.lr
    if total_steps is None:
        raise ConfigError(
            f"astuner.trainer_common.optim.lr_scheduler is {config.lr_scheduler}, which requires the number of "
            "training steps. Set trainer_common.total_steps, or lr_scheduler: constant"
        )
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    shape = 1 - progress if config.lr_scheduler == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * shape)
