"""Advantage estimators, with the names of ``algorithm.adv_estimator``.

R are the compared rewards (`astuner.contracts.objective.Compared`): of one role in one group, or in the step if noted.
=======================  ==========================================================================
``grpo``                 (R_i - mean R) / (std R + 1e-6), unbiased std (Shao et al. 2024, DeepSeekMath)
``dr_grpo``              R_i - mean R (Liu et al. 2025, Dr. GRPO)
``rloo``                 R_i - mean of the other rewards (Ahmadian et al. 2024)
``reinforce_plus_plus``  (R_i - mean over the step) / (std over the step + 1e-6) (Hu et al. 2025)
``none``                 R_i
=======================  ==========================================================================
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from astuner.contracts.objective import Compared, step_wide

EPSILON = 1e-6
"""Gives equal rewards the advantage 0 instead of 0/0."""


def grpo(compared: Compared) -> list[float]:
    """Return the rewards, centered and scaled by their standard deviation."""
    mean, std = _mean_std(compared.rewards)
    scale = std + EPSILON if compared.norm_by_std else 1.0
    return [(reward - mean) / scale for reward in compared.rewards]


def dr_grpo(compared: Compared) -> list[float]:
    """Return the centered rewards."""
    mean, _ = _mean_std(compared.rewards)
    return [reward - mean for reward in compared.rewards]


def rloo(compared: Compared) -> list[float]:
    """Return each reward minus the mean of the other rewards."""
    size = len(compared.rewards)
    return [advantage * size / (size - 1) if size > 1 else 0.0 for advantage in dr_grpo(compared)]


@step_wide
def reinforce_plus_plus(compared: Compared) -> list[float]:
    """Return the rewards, centered and scaled over the step."""
    mean, std = _mean_std(compared.rewards)
    return [(reward - mean) / (std + EPSILON) for reward in compared.rewards]


def none(compared: Compared) -> list[float]:
    """Return the rewards unchanged."""
    return list(compared.rewards)


def _mean_std(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and unbiased standard deviation, which is 0 for a single value.

    Equal rewards give exactly 0, without a rounding error.
    """
    if min(values) == max(values):
        return values[0], 0.0
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))
