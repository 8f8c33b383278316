"""What a step minimises, token by token: one definition for every backbone.

Everything here is a pure function of tensors of shape [N], the N trained tokens of whole samples, and returns tensors
of shape [N].  Nothing is aggregated: a trainer multiplies each token's total with its sample's `token_weight` and
sums, and that weight (set by `astuner.rollout.credit`) is where "token-mean" or "seq-mean-token-mean" happens.

Which log-probabilities are "old"?  Those the rollout recorded: they are what the tokens were drawn with, so the ratio
is the honest importance ratio, and no forward pass is spent on recomputing them.  With a `rollout_is` correction they
are the trainer's own, of the weights before the update, and the gap to the rollout's becomes a separate, truncated or
masked weight.

Notation: r = exp(log π_θ - log π_old), the importance ratio of a token; A, its advantage; all logs are natural.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from astuner.config.schema import Algorithm, TrainerCommon

if TYPE_CHECKING:
    from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Log ratios are clamped to ± this before exponentiation: e^20 is beyond every clip range, and finite."""


@dataclass(frozen=True)
class PolicyTerm:
    """The policy loss of each token, and what clipping did to it. All [N]."""

    loss: Tensor
    ratio: Tensor
    """The importance ratio used, detached."""
    clipped_low: Tensor
    """bool: the ratio was below the clip range and the clipped branch was taken (no gradient)."""
    clipped_high: Tensor
    """bool: the same above the range."""


PolicyLoss: TypeAlias = "Callable[[Tensor, Tensor, Tensor, Tensor, float, float], PolicyTerm]"
"""(logprobs, old_logprobs, advantages, owner, clip_low, clip_high); owner: each token's sample, 0 … S-1."""


def moves_without_advantage(settings: TrainerCommon) -> bool:
    """Whether a token whose advantage is 0 has a gradient: of the KL to the reference, or of the entropy bonus."""
    return settings.use_kl_loss or settings.entropy_coeff != 0


def log_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    return (logprobs - old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def per_sample_sum(values: Tensor, owner: Tensor) -> Tensor:
    """Sum of `values` [N] over each sample's tokens, given back to each token [N]."""
    samples = int(owner.max()) + 1 if len(owner) else 0
    return values.new_zeros(samples).index_add(0, owner, values).index_select(0, owner)


def _clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> PolicyTerm:
    loss = -(ratio * advantages).minimum(ratio.clamp(1 - low, 1 + high) * advantages)
    ratio = ratio.detach()
    return PolicyTerm(loss, ratio, (ratio < 1 - low) & (advantages < 0), (ratio > 1 + high) & (advantages > 0))


def ppo_clip(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, owner: Tensor, clip_low: float, clip_high: float
) -> PolicyTerm:
    """-min(r A, clip(r, 1 - ε_low, 1 + ε_high) A): PPO's clipped surrogate (Schulman et al. 2017, eq. 7).

    GRPO (Shao et al. 2024, DeepSeekMath, eq. 3), Dr. GRPO (Liu et al. 2025, Understanding R1-Zero-like training),
    DAPO (Yu et al. 2025, eq. 8: ε_high > ε_low, "clip-higher") and REINFORCE++ (Hu et al. 2025) share this token
    loss; they differ in the advantage and in the aggregation, which are set elsewhere.
    """
    return _clipped(log_ratio(logprobs, old_logprobs).exp(), advantages, clip_low, clip_high)


def gspo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, owner: Tensor, clip_low: float, clip_high: float
) -> PolicyTerm:
    """-min(s A, clip(s) A) with the sequence's ratio s = exp(mean_t log r_t): GSPO (Zheng et al. 2025, eq. 5-7).

    Every token of a sample carries its sample's value, so weights that sum to 1 over the sample give the paper's
    loss.  s is close to 1 (a geometric mean), so the paper clips at 3e-4 and 4e-4.
    """
    logs = log_ratio(logprobs, old_logprobs)
    mean = per_sample_sum(logs, owner) / per_sample_sum(logs.new_ones(logs.shape), owner)
    return _clipped(mean.exp(), advantages, clip_low, clip_high)


def cispo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, owner: Tensor, clip_low: float, clip_high: float
) -> PolicyTerm:
    """-sg[clip(r, 1 - ε_low, 1 + ε_high)] A log π_θ: CISPO (MiniMax 2025, MiniMax-M1, eq. 4-5).

    The weight is clipped instead of the update, so no token loses its gradient.  The paper leaves the lower side
    open; ``clip_ratio_low: 1`` says that here.
    """
    ratio = log_ratio(logprobs, old_logprobs).exp().detach()
    loss = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages * logprobs
    return PolicyTerm(loss, ratio, ratio < 1 - clip_low, ratio > 1 + clip_high)


def reinforce(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, owner: Tensor, clip_low: float, clip_high: float
) -> PolicyTerm:
    """-A log π_θ: REINFORCE, the loss of RLOO (Ahmadian et al. 2024, Back to basics, eq. 6-7).

    Neither ratio nor clipping: exact for one optimizer step per batch, biased by what later steps change.
    """
    none = logprobs.new_zeros(logprobs.shape).bool()
    return PolicyTerm(-advantages * logprobs, log_ratio(logprobs, old_logprobs).exp().detach(), none, none)


POLICY_LOSSES: Mapping[str, PolicyLoss] = {
    "grpo": ppo_clip,
    "dr_grpo": ppo_clip,
    "dapo": ppo_clip,
    "reinforce_plus_plus": ppo_clip,
    "gspo": gspo,
    "cispo": cispo,
    "rloo": reinforce,
}
"""By the names of ``algorithm.loss``."""


def kl_penalty(kind: str, logprobs: Tensor, reference: Tensor) -> Tensor:
    """Estimate of KL(π_θ || π_ref) at each token, from samples of π_θ (Schulman 2020, Approximating KL divergence).

    With d = log π_θ - log π_ref: ``k1`` = d (unbiased value; as a loss its gradient has mean zero, so it penalises
    nothing), ``k2`` = d²/2 (biased value, unbiased gradient), ``k3`` or ``low_var_kl`` = e^-d + d - 1 (unbiased
    value, positive).
    """
    d = log_ratio(logprobs, reference)
    if kind == "k1":
        return d
    if kind == "k2":
        return d.square() / 2
    if kind in ("k3", "low_var_kl"):
        return (-d).expm1() + d
    raise ValueError(f"unknown KL estimator {kind!r}")


def kl_from_rollout(logprobs: Tensor, rollout: Tensor) -> Tensor:
    """Estimate of KL(π_rollout || π_θ) at each token, from samples of π_rollout: k3 again, e^d - 1 - d, d = log r. [N]

    How far an update has moved away from the policy whose tokens it learns from; a log shows its mean as ``kl``.
    """
    return kl_penalty("k3", rollout, logprobs)


def rollout_correction(mode: str, trainer: Tensor, rollout: Tensor, owner: Tensor, threshold: float) -> Tensor:
    """Weight of each token's policy loss that corrects for an engine that is not quite the trainer's policy. [N]

    w = π_trainer / π_rollout, for the weights before the update.  ``token-truncate``: min(w_t, C), truncated
    importance sampling (Yao et al. 2025, Your efficient RL framework secretly brings you off-policy RL training);
    ``token-mask``: w_t where w_t ≤ C, else 0.  The ``sequence-`` modes use the product of w over the sample's tokens
    (Liu et al. 2025, When speed kills stability).  No gradient flows through it.
    """
    if mode == "none":
        return trainer.new_ones(trainer.shape)
    level, _, action = mode.partition("-")
    logs = (trainer - rollout).detach()
    if level == "sequence":
        logs = per_sample_sum(logs, owner)
    weight = logs.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    if action == "truncate":
        return weight.clamp(max=threshold)
    if action == "mask":
        return weight * (weight <= threshold)
    raise ValueError(f"unknown rollout correction {mode!r}")


@dataclass(frozen=True, kw_only=True)
class TokenLosses:
    """The loss of each token, its terms, and what a log shows of them. All [N], and not weighted."""

    total: Tensor
    """What is minimised: policy + β KL - c H."""
    policy: Tensor
    """The policy loss, with the rollout correction."""
    ratio: Tensor
    """The importance ratio used, detached."""
    clipped_low: Tensor
    clipped_high: Tensor
    """bool; see `PolicyTerm`."""
    kl: Tensor | None
    """KL to the reference; None without `use_kl_loss`."""
    correction: Tensor | None
    """`rollout_correction`; None without one."""


def old_logprobs(algorithm: Algorithm, *, rollout: Tensor, before: Tensor) -> Tensor:
    """The log-probabilities that ratios are taken to; see the module's text.

    :param rollout: those the rollout recorded.
    :param before: the trainer's own, of the weights before the update.
    """
    return rollout if algorithm.rollout_is == "none" else before


def token_losses(
    settings: TrainerCommon,
    *,
    logprobs: Tensor,
    rollout: Tensor,
    old: Tensor,
    advantage: Tensor,
    owner: Tensor,
    reference: Tensor | None = None,
    entropy: Tensor | None = None,
) -> TokenLosses:
    """The loss of a step for each trained token, as ``trainer_common`` says.

    :param logprobs: under the weights that are trained; the gradient flows through these and ``entropy``.
    :param rollout: as the rollout recorded them.
    :param old: what `old_logprobs` says.
    :param advantage: of the token's sample.
    :param owner: the token's sample, 0 … S-1; all trained tokens of a sample are here, for losses over sequences.
    :param reference: log-probabilities under the reference model, for `use_kl_loss`.
    :param entropy: of the distribution each token was drawn from, for `entropy_coeff`.
    :raises ValueError: a term is asked for without what it is made of.
    """
    algorithm = settings.algorithm
    term = POLICY_LOSSES[algorithm.loss](
        logprobs, old, advantage, owner, algorithm.clip_ratio_low, algorithm.clip_ratio_high
    )
    policy, correction, kl = term.loss, None, None
    if algorithm.rollout_is != "none":
        correction = rollout_correction(algorithm.rollout_is, old, rollout, owner, algorithm.rollout_is_threshold)
        policy = policy * correction
    total = policy
    if settings.use_kl_loss:
        if reference is None:
            raise ValueError("trainer_common.use_kl_loss needs the log-probabilities of the reference model")
        kl = kl_penalty(settings.kl_loss_type, logprobs, reference)
        total = total + settings.kl_loss_coef * kl
    if settings.entropy_coeff != 0:
        if entropy is None:
            raise ValueError("trainer_common.entropy_coeff needs the entropy of each token's distribution")
        total = total - settings.entropy_coeff * entropy
    return TokenLosses(
        total=total,
        policy=policy,
        ratio=term.ratio,
        clipped_low=term.clipped_low,
        clipped_high=term.clipped_high,
        kl=kl,
        correction=correction,
    )
