"""Advantages over the episodes of a group, and the weight of each trained token.

Advantages are computed over *episodes*, then given to all samples of the episode: an episode that forks into many
samples counts once in the group's statistics.  Aggregation is a weight per token: whatever the mode, the policy
loss of a step is the sum over all trained tokens of ``token_weight * token_loss``, so a backbone only adds up.

With R the rewards of a group's G scored episodes, E the scored episodes of the step, T_e the trained tokens of
episode e, and L a constant length:

=======================  ==========================================================================
``grpo``                 (R_i - mean R) / (std R + 1e-6), unbiased std (Shao et al. 2024, DeepSeekMath)
``dr_grpo``              R_i - mean R (Liu et al. 2025, Dr. GRPO)
``rloo``                 R_i - mean of the other rewards (Ahmadian et al. 2024)
``reinforce_plus_plus``  (R_i - mean over the step) / (std over the step + 1e-6) (Hu et al. 2025)
``none``                 R_i
-----------------------  --------------------------------------------------------------------------
``token-mean``               1 / sum of all T_e (DAPO, Yu et al. 2025)
``seq-mean-token-mean``      1 / (E * T_e)      (GRPO)
``seq-mean-token-sum``       1 / E
``seq-mean-token-sum-norm``  1 / (E * L)        (Dr. GRPO)
=======================  ==========================================================================
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from astuner.config.schema import Algorithm
from astuner.types import Sample

EPSILON = 1e-6
"""Keeps a group whose rewards are all equal at advantage 0 instead of 0/0."""


@dataclass(frozen=True, kw_only=True)
class Scored:
    """One scored episode: its group, its reward, and the samples it was cut into."""

    episode_id: str
    group_id: str
    reward: float
    samples: tuple[Sample, ...]


def assign_credit(
    episodes: Sequence[Scored],
    algorithm: Algorithm,
    *,
    constant_length: int,
    penalties: Mapping[str, float] | None = None,
) -> list[Sample]:
    """The samples of all ``episodes`` with ``advantage`` and ``token_weight`` set.

    :param constant_length: L, in tokens, for ``seq-mean-token-sum-norm``.
    :param penalties: episode id -> what to subtract from its reward (KL in the reward).
    """
    rewards = {e.episode_id: e.reward - (penalties or {}).get(e.episode_id, 0.0) for e in episodes}
    advantages = episode_advantages(
        [e.group_id for e in episodes],
        [rewards[e.episode_id] for e in episodes],
        algorithm.adv_estimator,
        norm_by_std=algorithm.norm_adv_by_std,
    )
    tokens = [sum(s.trained_tokens for s in e.samples) for e in episodes]
    weights = episode_token_weights(tokens, algorithm.loss_agg_mode, constant_length=constant_length)
    return [
        replace(s, advantage=advantage, token_weight=weight)
        for e, advantage, weight in zip(episodes, advantages, weights, strict=True)
        for s in e.samples
    ]


def episode_advantages(
    group_ids: Sequence[str], rewards: Sequence[float], estimator: str, *, norm_by_std: bool = True
) -> list[float]:
    """One advantage per episode, in the order given; see the module's table."""
    if estimator == "none":
        return list(rewards)
    if estimator == "reinforce_plus_plus":
        mean, std = _mean_std(rewards)
        return [(r - mean) / (std + EPSILON) for r in rewards]
    groups: dict[str, list[float]] = {}
    for group, reward in zip(group_ids, rewards, strict=True):
        groups.setdefault(group, []).append(reward)
    advantages = []
    for group, reward in zip(group_ids, rewards, strict=True):
        mean, std = _mean_std(groups[group])
        size = len(groups[group])
        advantage = reward - mean
        if estimator == "rloo":
            advantage *= size / (size - 1) if size > 1 else 0.0
        elif estimator == "grpo" and norm_by_std:
            advantage /= std + EPSILON
        advantages.append(advantage)
    return advantages


def episode_token_weights(trained_tokens: Sequence[int], mode: str, *, constant_length: int) -> list[float]:
    """What each trained token of an episode weighs, one number per episode; see the module's table."""
    n = len(trained_tokens)
    if mode == "token-mean":
        total = sum(trained_tokens)
        return [1.0 / total if total else 0.0] * n
    if mode == "seq-mean-token-mean":
        return [1.0 / (n * t) if t else 0.0 for t in trained_tokens]
    if mode == "seq-mean-token-sum":
        return [1.0 / n] * n
    if mode == "seq-mean-token-sum-norm":
        return [1.0 / (n * constant_length)] * n
    raise ValueError(f"unknown aggregation {mode!r}")


def _mean_std(values: Sequence[float]) -> tuple[float, float]:
    """Mean and unbiased standard deviation; 0 for fewer than two values.

    A group of equal rewards gets exactly 0, not the rounding error of a mean.
    """
    if not values:
        return 0.0, 0.0
    if min(values) == max(values):
        return values[0], 0.0
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))
