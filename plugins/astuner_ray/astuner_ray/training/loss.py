"""The loss of one micro-batch of rows, as a trainer that pads responses and averages over processes adds it up.

The loss is `astuner_objectives.step.token_losses`, weighted and summed as in every other backbone, so nothing of
such a trainer's own losses, aggregation modes or clipping takes part.  VERL's engine, which Trinity trains with too,
adds up what micro-batches give and averages over its data-parallel processes, while our weights are those of a sum over
the whole batch: so the loss is multiplied by the number of processes.  Metrics go the same way: a mean over tokens is
exact over micro-batches and processes within one optimizer step, and over the steps of a batch VERL takes the mean of
the means.  ``kl/mismatch_*`` compare the weights before the update with the rollout's: without a rollout correction
nobody keeps those log-probabilities, so only the first optimizer step of a batch has them, of the tokens in it.

Invariant: a row whose mask is zero (some fill a batch up) changes neither loss, gradient nor metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from astuner import TrainerCommon
from astuner_objectives.step import kl_from_rollout, logit_gradients, old_logprobs, token_losses
from astuner_ray.training.before_update import ROW, BeforeUpdate, Found
from astuner_ray.worker import experiment_folder


@dataclass(frozen=True)
class Measured:
    """A metric's share in one micro-batch."""

    how: Literal["sum", "max"]
    """How the shares of micro-batches become one number; over processes, sums are averaged."""
    value: Tensor | float


class RowLoss:
    """`micro_batch_loss` of padded rows under VERL's names, in its workers; can be sent to other processes.

    :param send: gets (step, found) as `BeforeUpdate` finds it, where the run has an episode log.
    """

    def __init__(self, settings: TrainerCommon, send: Callable[[int, Found], None] | None = None) -> None:
        self._settings = settings
        self._watcher = BeforeUpdate(send)
        self._alone = settings.mini_batch_num * settings.ppo_epochs == 1
        """Whether an update is one optimizer step, whose own log-probabilities are then the old ones."""
        reference = ["ref_log_prob"] if settings.use_kl_loss else []
        self.columns = ["response_mask", "rollout_log_probs", "old_log_probs", "advantages", *reference]
        """What it reads of a row, [rows, response]; ``old_log_probs`` are from the weights before the update."""
        self.told = ["token_weight", ROW, "global_batch_size", "dp_size", "batch_num_tokens"]
        """And what there is once: numbers of a row, [rows], which are ours, and those that VERL's engine adds."""

    def __call__(
        self, logprobs: Tensor, columns: Mapping[str, Any], told: Mapping[str, Any], entropy: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Measured]]:
        """The micro-batch's scalar and metrics."""
        rows = {name: columns[name] for name in self.columns}
        trained, processes = rows["response_mask"], told["dp_size"]
        before = logprobs.detach() if self._alone else rows["old_log_probs"]
        of_step = told["global_batch_size"] // processes
        first = self._watcher.see(
            self._settings, rows=told[ROW], logprobs=logprobs, before=before, trained=trained, rows_of_step=of_step
        )
        return micro_batch_loss(
            self._settings,
            logprobs=logprobs,
            trained=trained,
            rollout=rows["rollout_log_probs"],
            before=before,
            moved=not first,
            advantages=rows["advantages"],
            token_weight=told["token_weight"],
            processes=processes,
            tokens=told["batch_num_tokens"],
            reference=rows.get("ref_log_prob"),
            entropy=entropy,
        )


def micro_batch_loss(
    settings: TrainerCommon,
    *,
    logprobs: Tensor,
    trained: Tensor,
    rollout: Tensor,
    before: Tensor,
    moved: bool = False,
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
    :param moved: whether the weights are no longer those, so that without ``before`` there is no mismatch to measure.
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

    mine, recorded, spread = of_trained(logprobs).float(), of_trained(rollout), of_trained(entropy)
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
    gap = None if moved and old is recorded else ((mine.detach() if old is recorded else old) - recorded).abs()
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
    sizes = logit_gradients(settings, losses, logprobs=mine, weight=weight, entropy=spread)
    measured |= {name: Measured("sum", size) for name, size in sizes.items()}
    measured |= {
        name: token_mean(of, processes=processes, tokens=tokens) for name, of in means.items() if of is not None
    }
    measured |= {
        name: Measured("max", of.max() if len(of) else 0.0)
        for name, of in (("kl/mismatch_max", gap), ("ratio/max", losses.ratio))
        if of is not None
    }
    return (weight * losses.total).sum(), measured


def row_weights(token_weight: Tensor, processes: int) -> Tensor:
    """What a row's tokens are multiplied with, so that a mean over ``processes`` is our sum."""
    return processes * token_weight


def token_mean(values: Tensor, *, processes: int, tokens: float) -> Measured:
    """The share of ``values`` [N] in a mean over all trained tokens of an optimizer step."""
    return Measured("sum", processes / max(tokens, 1) * values.detach().float().sum())
