"""The objective of a training step per token, defined once for all backbones.

All functions are pure functions of tensors of shape [N], the N trained tokens of complete samples, and return tensors
of
shape [N]. Nothing is aggregated: a trainer multiplies each token's total by its sample's `token_weight` and sums. That
weight (from `astuner.rollout.credit`) implements modes such as "token-mean" and "seq-mean-token-mean".

"Old" log-probabilities are the ones recorded in the rollout. The tokens were sampled with them, so the ratio is the
true
importance ratio, and no forward pass is needed to recompute them. With a `rollout_is` correction they are the
trainer's,
for the weights before the update, and the difference to the rollout's becomes a separate, truncated or masked weight.

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
    """Return whether tokens with advantage 0 have a gradient, from the KL term or the entropy bonus."""
    return settings.use_kl_loss or settings.entropy_coeff != 0


def kl_penalty(kind: str, logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return an estimate of KL(π_θ || π_ref) per token, from samples of π_θ.

    Source: Schulman 2020, Approximating KL divergence.
    With d = log π_θ - log π_ref: ``k1`` = d (unbiased value; as a loss its gradient has mean zero, so it has no
    effect), ``k2`` = d²/2 (biased value, unbiased gradient), ``k3`` or ``low_var_kl`` = e^-d + d - 1 (unbiased value,
    positive).
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
    """Return the k3 estimate of KL(π_rollout || π_θ) per token, e^d - 1 - d with d = log r.

    The result is [N]. It measures how far an update has moved from the policy that sampled the tokens. Its mean is the
    metric ``kl``.
    """
    return kl_penalty("k3", rollout, logprobs)


def rollout_correction(mode: str, given: LossInput, threshold: float) -> Tensor:
    """Return the weight of each token's policy loss that corrects differences between engine and trainer.

    The result is [N]. w = π_trainer / π_rollout, for the weights before the update. ``token-truncate``: min(w_t, C),
    truncated importance
    sampling (Yao et al. 2025, Your efficient RL framework secretly brings you off-policy RL training). ``token-mask``:
    w_t if w_t ≤ C, otherwise 0. The ``sequence-`` modes use the product of w over the sample's tokens (Liu et al. 2025,
    When speed kills stability). The weight has no gradient.
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
    """The loss of each token, its terms, and values for metrics. All [N] and unweighted."""

    total: Tensor
    """The minimized value: policy + β KL - c H."""
    policy: Tensor
    """Policy loss, including the rollout correction."""
    ratio: Tensor
    """Importance ratio, detached."""
    clipped_low: Tensor
    clipped_high: Tensor
    """Booleans; see `astuner.contracts.objective.TokenLoss`."""
    kl: Tensor | None
    """KL to the reference model; None without `use_kl_loss`."""
    correction: Tensor | None
    """Result of `rollout_correction`; None without a correction."""
    more: Mapping[str, Tensor]
    """Further values of the loss, for the metrics ``loss/NAME``."""


def logit_gradients(
    settings: TrainerCommon, losses: TokenLosses, *, logprobs: Tensor, weight: Tensor, entropy: Tensor | None
) -> dict[str, Tensor]:
    """Measure how strongly each term of the loss pulls on the logits: ``logit_grad/NAME`` -> a scalar.

    Each value is the sum over tokens of half the L1 norm of the gradient of a weighted term with respect to the
    token's logits. For a term that depends on the logits through log π of the sampled token, that norm is exactly
    |∂term/∂log π| (1 - π), because ∂log π/∂logits = onehot - softmax. For the entropy bonus c H it is at most
    |c| H, because Σ p |log p + H| <= 2 H; the bound is tight for a peaked distribution. The values of the terms are
    comparable, without another backward pass through the model.

    :param logprobs: [N]; as passed to `token_losses`.
    :param weight: [N]; the trainer's token weights.
    :param entropy: [N]; of the distribution of each token, if known.
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
    """Return the entropy bonus's value in `logit_gradients`, as a detached scalar."""
    return abs(coefficient) * (weight * entropy.detach()).sum()


def is_corrected(algorithm: AlgorithmSection) -> bool:
    """Return whether a `rollout_is` correction is set. ``auto`` means none until a backbone has replaced it."""
    return algorithm.rollout_is not in ("auto", "none")


def old_logprobs(algorithm: AlgorithmSection, *, rollout: Tensor, before: Tensor) -> Tensor:
    """Return the log-probabilities in the denominator of ratios; see the module's description.

    :param rollout: Recorded in the rollout.
    :param before: Computed by the trainer, for the weights before the update.
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
    """Return the loss of a step for each trained token, as configured in ``trainer_common``.

    :param logprobs: [N]; for the trained weights. The gradient flows through them and ``entropy``.
    :param rollout: [N]; recorded in the rollout.
    :param old: [N]; from `old_logprobs`.
    :param advantage: [N]; of the token's sample.
    :param owner: [N]; index of the token's sample, 0 … S-1. All trained tokens of a sample are included, for losses
        over sequences.
    :param reference: [N]; log-probabilities of the reference model, for `use_kl_loss`.
    :param entropy: [N]; of the distribution of each token, for `entropy_coeff`.
    :param base_dir: Folder of the experiment file, which is searched for user losses.
    :raises PluginError: `algorithm.loss` is unknown, raised, or returned an invalid value.
    :raises ValueError: The input of an enabled term is missing.
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
