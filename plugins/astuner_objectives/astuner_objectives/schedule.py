"""The learning rate of each optimizer step: one definition, so that an experiment is the same on every backbone.

A step is an update of the weights, of which a step of the run may take several (`trainer_common.mini_batch_num` and
`ppo_epochs`).  Invariant: the rate depends on the settings and the step's number only, so a resumed run needs no more
than that number to go on.
"""

from __future__ import annotations

import math

from astuner import Optim
from astuner.contracts.errors import ConfigError


def mean_learning_rate(config: Optim, first: int, steps: int, total_steps: int | None) -> float:
    """The mean rate of ``steps`` optimizer steps, the first of which has the number ``first``: what a log shows.

    :raises ConfigError: as `learning_rate`.
    """
    return sum(learning_rate(config, first + i, total_steps) for i in range(steps)) / steps


def learning_rate(config: Optim, step: int, total_steps: int | None) -> float:
    """The rate of optimizer step `step` (from 0): linear warm-up from 0, then constant, linear or cosine decay.

    :param total_steps: optimizer steps of the whole run, the warm-up among them.
    :raises ConfigError: a schedule that decays needs `total_steps`.
    """
    warmup = config.lr_warmup_steps
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.lr_scheduler == "constant":
        return config.lr
    if total_steps is None:
        raise ConfigError(
            f"astuner.trainer_common.optim.lr_scheduler is {config.lr_scheduler}, which needs to know where training "
            "ends; set trainer_common.total_steps, or lr_scheduler: constant"
        )
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    shape = 1 - progress if config.lr_scheduler == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * shape)
