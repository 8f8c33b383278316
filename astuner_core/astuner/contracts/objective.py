"""Interfaces of advantage estimators and policy losses.

Both are plain functions, registered by a plugin (`register_losses`, `register_advantages`) or named in an experiment
as ``path/to/file.py->function``. They work on every backbone that trains in Python. All of them share the selection of
compared rewards and the token weights (`astuner.rollout.credit`), the KL and entropy terms, and the correction for
differences between rollout and trainer (``astuner_objectives.step``).

A loss in five lines::

    def advantage_weighted(given: LossInput) -> Tensor:
        ratio = given.ratio.clamp(1 - given.clip_low, 1 + given.clip_high)
        return -(ratio * given.advantages)

An estimator in three::

    def above_the_median(compared: Compared) -> list[float]:
        middle = statistics.median(compared.rewards)
        return [reward - middle for reward in compared.rewards]

This module does not import torch; a loss receives tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Bound of log ratios before exponentiation: e^20 is finite and beyond every clip range."""


@dataclass(frozen=True, kw_only=True)
class LossInput:
    """Input of a loss: the N tokens of a micro-batch whose loss mask is 1. A micro-batch has complete samples only.

    Tensors are float32 [N] on the trainer's device, unless noted. Log-probabilities are natural logarithms.
    """

    logprobs: Tensor
    """Log-probabilities under the trained weights, with gradient."""
    old_logprobs: Tensor
    """Log-probabilities in the denominator of ratios: the rollout's, or with a `rollout_is` correction the trainer's
    before the update."""
    rollout_logprobs: Tensor
    """Log-probabilities recorded by the rollout."""
    advantages: Tensor
    """Advantage of each token's sample."""
    owner: Tensor
    """int64: index of each token's sample, 0 ... S-1. Contains all trained tokens of each sample."""
    clip_low: float
    """`algorithm.clip_ratio_low`."""
    clip_high: float
    """`algorithm.clip_ratio_high`."""
    reference_logprobs: Tensor | None = None
    """Log-probabilities under the reference model; None without `use_kl_loss`. The trainer adds the KL term itself."""

    @property
    def log_ratio(self) -> Tensor:
        """Return log π_θ - log π_old of each token, clamped to ± `LOG_RATIO_LIMIT`."""
        return (self.logprobs - self.old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)

    @property
    def ratio(self) -> Tensor:
        """Return the importance ratio π_θ / π_old of each token."""
        return self.log_ratio.exp()

    def sample_sum(self, values: Tensor) -> Tensor:
        """Return the sum of ``values`` [N] over each sample's tokens, repeated for each token [N]."""
        samples = int(self.owner.max()) + 1 if len(self.owner) else 0
        return values.new_zeros(samples).index_add(0, self.owner, values).index_select(0, self.owner)

    def sample_mean(self, values: Tensor) -> Tensor:
        """Return the mean of ``values`` [N] over each sample's tokens, repeated for each token [N]."""
        return self.sample_sum(values) / self.sample_sum(values.new_ones(values.shape))


@dataclass(frozen=True, kw_only=True)
class TokenLoss:
    """Result of a loss with additional values to log. All tensors are [N] and unweighted."""

    loss: Tensor
    """Loss of each token. The trainer minimizes the weighted sum (`algorithm.loss_agg_mode`)."""
    ratio: Tensor | None = None
    """Importance ratio used by the loss, detached; None: `LossInput.ratio`."""
    clipped_low: Tensor | None = None
    """bool: whether the token was clipped because its ratio was below the clip range; None: the loss does not clip."""
    clipped_high: Tensor | None = None
    """bool: whether the token was clipped because its ratio was above the clip range."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """Values whose means over tokens are logged as ``loss/NAME``. A name contains letters, digits and ``_``."""


class Loss(Protocol):
    """A policy loss, selected with `astuner.trainer_common.algorithm.loss`.

    It is called once per micro-batch in the trainer's process and keeps no state.
    """

    def __call__(self, given: LossInput, /) -> Tensor | TokenLoss:
        """Return the loss of each token as [N], or as a `TokenLoss` with values to log."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Rewards to compare: of one role in one group or, for a `step_wide` estimator, in a complete step.

    A KL term in the reward is already subtracted. A team with a shared reward counts once (`astuner.rollout.credit`).
    """

    rewards: Sequence[float]
    """Rewards [n], n >= 1."""
    groups: Sequence[str]
    """Group of each reward [n]; the same group for all unless the estimator is step-wide."""
    norm_by_std: bool = True
    """`algorithm.norm_adv_by_std`."""


class AdvantageEstimator(Protocol):
    """An advantage estimator, selected with `astuner.trainer_common.algorithm.adv_estimator`.

    It is called once for each set of compared rewards in the run's process and keeps no state.
    """

    def __call__(self, compared: Compared, /) -> Sequence[float]:
        """Return one finite advantage per reward, in order."""


E = TypeVar("E", bound=Callable[..., object])
_STEP_WIDE = "step_wide"


def step_wide(estimator: E) -> E:
    """Mark an estimator that compares all episodes of a step instead of one group; a decorator."""
    setattr(estimator, _STEP_WIDE, True)
    return estimator


def is_step_wide(estimator: AdvantageEstimator) -> bool:
    """Return whether an estimator compares all episodes of a step."""
    return bool(getattr(estimator, _STEP_WIDE, False))
