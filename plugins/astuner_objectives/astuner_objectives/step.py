"""What a step minimises, token by token: one definition for every backbone.

Everything here is a pure function of tensors of shape [N], the N trained tokens of whole samples, and returns tensors
of shape [N].  Nothing is aggregated: a trainer multiplies each token's total with its sample's `token_weight` and
sums, and that weight (set by `astuner.rollout.credit`) is where "token-mean" or "seq-mean-token-mean" happens.

Which log-probabilities are "old"?  Those the rollout recorded: they are what the tokens were drawn with, so the ratio
is the honest importance ratio, and no forward pass is spent on recomputing them.  With a `rollout_is` correction they
are the trainer's own, of the weights before the update, and the gap to the rollout's becomes a separate, truncated or
masked weight.

All logarithms are natural.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from astuner import AlgorithmSection, TrainerCommon, find_loss, token_loss
from astuner.contracts.objective import LOG_RATIO_LIMIT, LossInput

if TYPE_CHECKING:
    from torch import Tensor


def moves_without_advantage(settings: TrainerCommon) -> bool:
    """Whether a token whose advantage is 0 has a gradient: of the KL to the reference, or of the entropy bonus."""
    return settings.use_kl_loss or settings.entropy_coeff != 0


def kl_penalty(kind: str, logprobs: Tensor, reference: Tensor) -> Tensor:
    """Estimate of KL(π_θ || π_ref) at each token, from samples of π_θ (Schulman 2020, Approximating KL divergence).

    With d = log π_θ - log π_ref: ``k1`` = d (unbiased value; as a loss its gradient has mean zero, so it penalises
    nothing), ``k2`` = d²/2 (biased value, unbiased gradient), ``k3`` or ``low_var_kl`` = e^-d + d - 1 (unbiased
    value, positive).
    """
    d = (logprobs - reference).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
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


def rollout_correction(mode: str, given: LossInput, threshold: float) -> Tensor:
    """Weight of each token's policy loss that corrects for an engine that is not quite the trainer's policy. [N]

    w = π_trainer / π_rollout, for the weights before the update.  ``token-truncate``: min(w_t, C), truncated
    importance sampling (Yao et al. 2025, Your efficient RL framework secretly brings you off-policy RL training);
    ``token-mask``: w_t where w_t ≤ C, else 0.  The ``sequence-`` modes use the product of w over the sample's tokens
    (Liu et al. 2025, When speed kills stability).  No gradient flows through it.
    """
    if mode == "none":
        return given.old_logprobs.new_ones(given.old_logprobs.shape)
    level, _, action = mode.partition("-")
    logs = (given.old_logprobs - given.rollout_logprobs).detach()
    if level == "sequence":
        logs = given.sample_sum(logs)
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
    """bool; see `astuner.contracts.objective.TokenLoss`."""
    kl: Tensor | None
    """KL to the reference; None without `use_kl_loss`."""
    correction: Tensor | None
    """`rollout_correction`; None without one."""
    more: Mapping[str, Tensor]
    """What else the loss measures, by the names that a log shows: ``loss/NAME``."""


def logit_gradients(
    settings: TrainerCommon, losses: TokenLosses, *, logprobs: Tensor, weight: Tensor, entropy: Tensor | None
) -> dict[str, Tensor]:
    """Measure how strongly each term of the loss pulls on the logits: ``logit_grad/NAME`` -> a scalar.

    Each value is the sum over tokens of half the L1 norm of the gradient of a weighted term with respect to the
    token's logits. For a term that depends on the logits through log π of the sampled token, that norm is exactly
    |∂term/∂log π| (1 - π), because ∂log π/∂logits = onehot - softmax. For the entropy bonus c H it is at most
    |c| H, because Σ p |log p + H| <= 2 H; the bound is tight for a peaked distribution. So the values of the terms
    can be compared with each other, without another backward pass through the model.

    :param logprobs: [N]; as given to `token_losses`.
    :param weight: [N]; the token weights that the trainer multiplies the loss with.
    :param entropy: [N]; of the distribution each token was drawn from, if known.
    :returns: ``policy``; ``kl`` with `use_kl_loss`; ``entropy`` with an `entropy_coeff`. Detached.
    """
    import torch

    not_sampled = -logprobs.detach().clamp(max=0).expm1()
    terms = {"policy": losses.policy}
    if losses.kl is not None:
        terms["kl"] = settings.kl_loss_coef * losses.kl
    sizes = {}
    for name, term in terms.items():
        if term.requires_grad:
            (gradient,) = torch.autograd.grad((weight * term).sum(), logprobs, retain_graph=True)
            sizes[f"logit_grad/{name}"] = (gradient.abs() * not_sampled).sum()
    if settings.entropy_coeff != 0 and entropy is not None:
        sizes["logit_grad/entropy"] = entropy_gradient(settings.entropy_coeff, entropy, weight)
    return sizes


def entropy_gradient(coefficient: float, entropy: Tensor, weight: Tensor) -> Tensor:
    """Return the entropy bonus's value of `logit_gradients`. Detached scalar."""
    return abs(coefficient) * (weight * entropy.detach()).sum()


def is_corrected(algorithm: AlgorithmSection) -> bool:
    """Whether a `rollout_is` correction is asked for; ``auto`` is none until a backbone has made it another."""
    return algorithm.rollout_is not in ("auto", "none")


def old_logprobs(algorithm: AlgorithmSection, *, rollout: Tensor, before: Tensor) -> Tensor:
    """The log-probabilities that ratios are taken to; see the module's text.

    :param rollout: those the rollout recorded.
    :param before: the trainer's own, of the weights before the update.
    """
    return before if is_corrected(algorithm) else rollout


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
    base_dir: Path | None = None,
) -> TokenLosses:
    """The loss of a step for each trained token, as ``trainer_common`` says.

    :param logprobs: under the weights that are trained; the gradient flows through these and ``entropy``.
    :param rollout: as the rollout recorded them.
    :param old: what `old_logprobs` says.
    :param advantage: of the token's sample.
    :param owner: the token's sample, 0 … S-1; all trained tokens of a sample are here, for losses over sequences.
    :param reference: log-probabilities under the reference model, for `use_kl_loss`.
    :param entropy: of the distribution each token was drawn from, for `entropy_coeff`.
    :param base_dir: where a loss of the user's own is looked for: the experiment file's folder.
    :raises PluginError: `algorithm.loss` names none, or it raises, or returns something else.
    :raises ValueError: a term is asked for without what it is made of.
    """
    algorithm = settings.algorithm
    given = LossInput(
        logprobs=logprobs,
        old_logprobs=old,
        rollout_logprobs=rollout,
        advantages=advantage,
        owner=owner,
        clip_low=algorithm.clip_ratio_low,
        clip_high=algorithm.clip_ratio_high,
        reference_logprobs=reference,
    )
    term = token_loss(algorithm.loss, find_loss(algorithm.loss, base_dir), given)
    policy, correction, kl = term.loss, None, None
    none = advantage.new_zeros(advantage.shape).bool()
    if is_corrected(algorithm):
        correction = rollout_correction(algorithm.rollout_is, given, algorithm.rollout_is_threshold)
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
        ratio=given.ratio.detach() if term.ratio is None else term.ratio,
        clipped_low=none if term.clipped_low is None else term.clipped_low,
        clipped_high=none if term.clipped_high is None else term.clipped_high,
        kl=kl,
        correction=correction,
        more={f"loss/{name}": values.detach().float() for name, values in term.metrics.items()},
    )
