"""The loss of one micro-batch of rows, as a trainer that pads responses and averages over processes adds it up.

The loss is `astuner_objectives.step.token_losses`, weighted and summed as in every other backbone, so nothing of
such a trainer's own losses, aggregation modes or clipping takes part.  VERL's engine, which Trinity trains with too,
adds up what micro-batches give and averages over its data-parallel processes, while our weights are those of a sum over
the whole batch: so the loss is multiplied by the number of processes.  Metrics go the same way: a mean over tokens is
exact over micro-batches and processes within one optimizer step, and over the steps of a batch VERL takes the mean of
the means.  One number means less in a batch of several steps: without a rollout correction nobody keeps the
log-probabilities from before the update, so ``kl/mismatch_*`` then include how far the weights have moved.

Invariant: a row whose mask is zero (some fill a batch up) changes neither loss, gradient nor metrics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from astuner import TrainerCommon
from astuner_objectives.step import kl_from_rollout, old_logprobs, token_losses
from astuner_ray.worker import experiment_folder


@dataclass(frozen=True)
class Measured:
    """A metric's share in one micro-batch."""

    how: Literal["sum", "max"]
    """How the shares of micro-batches become one number; over processes, sums are averaged."""
    value: Tensor | float


def micro_batch_loss(
    settings: TrainerCommon,
    *,
    logprobs: Tensor,
    trained: Tensor,
    rollout: Tensor,
    before: Tensor,
    advantages: Tensor,
    token_weight: Tensor,
    processes: int,
    tokens: float,
    reference: Tensor | None = None,
    entropy: Tensor | None = None,
) -> tuple[Tensor, dict[str, Measured]]:
    """The scalar to call ``backward`` on, and what a log shows.

    All tensors are [rows, response], but for ``token_weight``; each is the value at the token itself, not at the one
    before it.

    :param logprobs: under the weights that are trained; the gradient flows through these and ``entropy``.
    :param trained: whether the model generated the token, and no other row trains it.
    :param rollout: log-probabilities as the rollout recorded them.
    :param before: those of the weights before the update; only a rollout correction reads them.
    :param token_weight: [rows] float32; `Sample.token_weight` times what a part of the batch is scaled up by when it
        is an optimizer step of its own.
    :param processes: over how many the trainer averages gradients.
    :param tokens: trained tokens of the optimizer step, in all its micro-batches and processes.
    :param reference: log-probabilities under the reference model, for `use_kl_loss`.
    :param entropy: of the distribution each token was drawn from; needed for `entropy_coeff`, else for the log only.
    :raises ValueError: a term is asked for without what it is made of.
    """
    trained = trained.bool()
    owner = trained.nonzero()[:, 0]

    def of_trained(values: Tensor | None) -> Any:
        return None if values is None else values[trained]

    mine, recorded, spread = of_trained(logprobs), of_trained(rollout), of_trained(entropy)
    old = old_logprobs(settings.algorithm, rollout=recorded, before=of_trained(before))
    losses = token_losses(
        settings,
        logprobs=mine,
        rollout=recorded,
        old=old,
        advantage=of_trained(advantages),
        owner=owner,
        reference=of_trained(reference),
        entropy=spread,
        base_dir=experiment_folder(),
    )
    weight = row_weights(token_weight, processes)[owner]
    gap = ((mine.detach() if old is recorded else old) - recorded).abs()
    means = {
        "kl": kl_from_rollout(mine.detach(), recorded),
        "kl/mismatch_mean": gap,
        "rollout_is/weight": losses.correction,
        "kl/ref": losses.kl,
        "entropy": spread,
        "ratio/mean": losses.ratio,
        "clip_frac/low": losses.clipped_low,
        "clip_frac/high": losses.clipped_high,
        **losses.more,
    }
    measured = {"pg_loss": Measured("sum", (weight * losses.policy).sum().detach())}
    measured |= {
        name: token_mean(of, processes=processes, tokens=tokens) for name, of in means.items() if of is not None
    }
    measured |= {
        name: Measured("max", of.max() if len(of) else 0.0)
        for name, of in (("kl/mismatch_max", gap), ("ratio/max", losses.ratio))
    }
    return (weight * losses.total).sum(), measured


def row_weights(token_weight: Tensor, processes: int) -> Tensor:
    """What a row's tokens are multiplied with, so that a mean over ``processes`` is our sum."""
    return processes * token_weight


def token_mean(values: Tensor, *, processes: int, tokens: float) -> Measured:
    """The share of ``values`` [N] in a mean over all trained tokens of an optimizer step."""
    return Measured("sum", processes / max(tokens, 1) * values.detach().sum())
