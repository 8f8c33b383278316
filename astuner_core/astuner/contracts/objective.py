"""What is learnt from rewards: advantage estimators, and the policy loss of each trained token.

Both are plain functions, registered by a plugin (`register_losses`, `register_advantages`) or named in an experiment
as ``path/to/file.py->function``; they work on every backbone that trains in Python.  What stands around them is the
same for all: who is compared with whom and what a token weighs (`astuner.rollout.credit`), KL to the reference,
entropy bonus and the correction of a rollout that is not quite the trainer's policy (``astuner_objectives.step``).

A loss in five lines::

    def advantage_weighted(given: LossInput) -> Tensor:
        ratio = given.ratio.clamp(1 - given.clip_low, 1 + given.clip_high)
        return -(ratio * given.advantages)

An estimator in three::

    def above_the_median(compared: Compared) -> list[float]:
        middle = statistics.median(compared.rewards)
        return [reward - middle for reward in compared.rewards]

Importing this module imports no torch: a loss is given tensors, and may do with them what it likes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Log ratios are clamped to ± this before exponentiation: e^20 is beyond every clip range, and finite."""


@dataclass(frozen=True, kw_only=True)
class LossInput:
    """What a loss is made of: the N tokens of a micro-batch whose loss mask is 1, of whole samples.

    All are float32 [N] on the trainer's device, unless said otherwise, and log-probabilities are natural logarithms.
    """

    logprobs: Tensor
    """Under the weights that are trained; the gradient flows through these."""
    old_logprobs: Tensor
    """Those that ratios are taken to: the rollout's, or with a `rollout_is` correction the trainer's own from before
    the update."""
    rollout_logprobs: Tensor
    """As the rollout recorded them."""
    advantages: Tensor
    """Of each token's sample."""
    owner: Tensor
    """int64: each token's sample, 0 … S-1; all trained tokens of a sample are here."""
    clip_low: float
    """`algorithm.clip_ratio_low`."""
    clip_high: float
    """`algorithm.clip_ratio_high`."""
    reference_logprobs: Tensor | None = None
    """Under the reference model; None without `use_kl_loss`, which also adds its own term."""

    @property
    def log_ratio(self) -> Tensor:
        """log π_θ - log π_old of each token, within ± `LOG_RATIO_LIMIT`."""
        return (self.logprobs - self.old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)

    @property
    def ratio(self) -> Tensor:
        """The importance ratio π_θ / π_old of each token."""
        return self.log_ratio.exp()

    def sample_sum(self, values: Tensor) -> Tensor:
        """The sum of ``values`` [N] over each sample's tokens, given back to each token [N]."""
        samples = int(self.owner.max()) + 1 if len(self.owner) else 0
        return values.new_zeros(samples).index_add(0, self.owner, values).index_select(0, self.owner)

    def sample_mean(self, values: Tensor) -> Tensor:
        """The mean of ``values`` [N] over each sample's tokens, given back to each token [N]."""
        return self.sample_sum(values) / self.sample_sum(values.new_ones(values.shape))


@dataclass(frozen=True, kw_only=True)
class TokenLoss:
    """What a loss says of each token, and what a log shows of it. All [N], and not weighted."""

    loss: Tensor
    """What is minimised, summed over tokens by their weights (`algorithm.loss_agg_mode`)."""
    ratio: Tensor | None = None
    """The importance ratio used, detached; None: `LossInput.ratio`."""
    clipped_low: Tensor | None = None
    """bool: the ratio was below the clip range, and what the loss does there was done; None: nothing is clipped."""
    clipped_high: Tensor | None = None
    """bool: the same above the range."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """More numbers, whose means over tokens are logged as ``loss/NAME``; a name has letters, digits and ``_``."""


class Loss(Protocol):
    """The policy loss, chosen by `astuner.trainer_common.algorithm.loss`.

    Called once for each micro-batch, in the trainer's process; it keeps no state.
    """

    def __call__(self, given: LossInput, /) -> Tensor | TokenLoss:
        """The loss of each token: [N], or that with what else a log is to show."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Rewards that are compared with each other: of one role in one group, or (`step_wide`) in the whole step.

    KL in the reward is taken off, and a team that shares its reward counts once (`astuner.rollout.credit`).
    """

    rewards: Sequence[float]
    """[n]; at least one."""
    groups: Sequence[str]
    """[n]: the group that each belongs to; one and the same for an estimator that is not step-wide."""
    norm_by_std: bool = True
    """`algorithm.norm_adv_by_std`."""


class AdvantageEstimator(Protocol):
    """How rewards become advantages, chosen by `astuner.trainer_common.algorithm.adv_estimator`.

    Called once for each set of rewards that are compared, in the run's process; it keeps no state.
    """

    def __call__(self, compared: Compared, /) -> Sequence[float]:
        """One advantage for each reward, in their order; finite."""


E = TypeVar("E", bound=Callable[..., object])
_STEP_WIDE = "step_wide"


def step_wide(estimator: E) -> E:
    """Decorates an estimator that compares all episodes of a step, not those of one group."""
    setattr(estimator, _STEP_WIDE, True)
    return estimator


def is_step_wide(estimator: AdvantageEstimator) -> bool:
    """Whether it compares all episodes of a step."""
    return bool(getattr(estimator, _STEP_WIDE, False))
