"""Policy losses, with the names of ``algorithm.loss``; `astuner.contracts.objective` documents their input.

Notation: r = exp(log π_θ - log π_old), the importance ratio of a token; A, its advantage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from astuner.contracts.objective import LossInput, TokenLoss

if TYPE_CHECKING:
    from torch import Tensor


def _clipped(ratio: Tensor, given: LossInput) -> TokenLoss:
    low, high, advantages = 1 - given.clip_low, 1 + given.clip_high, given.advantages
    loss = -(ratio * advantages).minimum(ratio.clamp(low, high) * advantages)
    ratio = ratio.detach()
    return TokenLoss(
        loss=loss,
        ratio=ratio,
        clipped_low=(ratio < low) & (advantages < 0),
        clipped_high=(ratio > high) & (advantages > 0),
    )


def ppo_clip(given: LossInput) -> TokenLoss:
    """Return PPO's clipped surrogate, -min(r A, clip(r, 1 - ε_low, 1 + ε_high) A) (Schulman et al. 2017, eq. 7).

    GRPO (Shao et al. 2024, DeepSeekMath, eq. 3), Dr. GRPO (Liu et al. 2025, Understanding R1-Zero-like training),
    DAPO (Yu et al. 2025, eq. 8: ε_high > ε_low, "clip-higher") and REINFORCE++ (Hu et al. 2025) share this token
    loss; they differ in advantage and aggregation, which are set elsewhere.
    """
    return _clipped(given.ratio, given)


def gspo(given: LossInput) -> TokenLoss:
    """Return the GSPO loss -min(s A, clip(s) A) with the sequence ratio s = exp(mean_t log r_t).

    Source: Zheng et al. 2025, eq. 5-7. Every token has the value of its sample, so weights that sum to 1 over the
    sample give the paper's loss. s is close to 1 (a geometric mean), so the paper clips at 3e-4 and 4e-4.
    """
    return _clipped(given.sample_mean(given.log_ratio).exp(), given)


def cispo(given: LossInput) -> TokenLoss:
    """Return the CISPO loss -sg[clip(r, 1 - ε_low, 1 + ε_high)] A log π_θ (MiniMax 2025, MiniMax-M1, eq. 4-5).

    The weight is clipped instead of the update, so no token loses its gradient. The paper has no lower bound, which is
    ``clip_ratio_low: 1`` here.
    """
    low, high, ratio = 1 - given.clip_low, 1 + given.clip_high, given.ratio.detach()
    loss = -ratio.clamp(low, high) * given.advantages * given.logprobs
    return TokenLoss(loss=loss, ratio=ratio, clipped_low=ratio < low, clipped_high=ratio > high)


def reinforce(given: LossInput) -> Tensor:
    """Return the REINFORCE loss -A log π_θ, used by RLOO (Ahmadian et al. 2024, Back to basics, eq. 6-7).

    Without ratio and clipping, it is exact for one optimizer step per batch and biased for later steps.
    """
    return -given.advantages * given.logprobs
