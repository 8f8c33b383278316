"""Loss of one micro-batch of rows for a trainer that pads responses and averages over processes.

The loss is `astuner_objectives.step.token_losses`, weighted and summed as in every other backbone; the trainer's own
losses, aggregation modes and clipping are not used.  VERL's engine, which Trinity also uses, sums micro-batches and
averages over its data-parallel processes, while ASTuner's weights define a sum over the full batch: the loss is
therefore multiplied by the number of processes.  The same applies to metrics: a mean over tokens is exact over the
micro-batches and processes of one optimizer step; over the steps of a batch VERL takes the mean of the means.
``kl/mismatch_*`` compare the weights before the update with the rollout's: without a rollout correction these
log-probabilities are not kept, so only the first optimizer step of a batch reports them, for its own tokens.

Invariant: a row whose mask is zero (padding of a batch) changes neither loss, gradient nor metrics.
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
    """Contribution of one micro-batch to a metric."""

    how: Literal["sum", "max"]
    """How contributions of micro-batches are combined; sums are averaged over processes."""
    value: Tensor | float


class RowLoss:
    """`micro_batch_loss` with VERL's column names, for VERL's workers; can be sent to other processes.

    :param send: Receives (step, found) from `BeforeUpdate`, if the run has an episode log.
    """

    def __init__(self, settings: TrainerCommon, send: Callable[[int, Found], None] | None = None) -> None:
        self._settings = settings
        self._watcher = BeforeUpdate(send)
        self._alone = settings.mini_batch_num * settings.ppo_epochs == 1
        """Whether an update is a single optimizer step, whose own log-probabilities are the old ones."""
        reference = ["ref_log_prob"] if settings.use_kl_loss else []
        self.columns = ["response_mask", "rollout_log_probs", "old_log_probs", "advantages", *reference]
        """Columns of a row, [rows, response]; ``old_log_probs`` belong to the weights before the update."""
        self.told = ["token_weight", ROW, "global_batch_size", "dp_size", "batch_num_tokens"]
        """Values per row, [rows], added by ASTuner, and values per batch, added by VERL's engine."""

    def __call__(
        self, logprobs: Tensor, columns: Mapping[str, Any], told: Mapping[str, Any], entropy: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Measured]]:
        """Return the loss and the metrics of a micro-batch."""
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
    """Return the scalar to call ``backward`` on, and the metrics.

    All tensors except ``token_weight`` are [rows, response]; each value belongs to the token at its position.

    :param logprobs: Under the weights that are trained; the gradient flows through these and ``entropy``.
    :param trained: Whether the model generated the token, and no other row trains it.
    :param rollout: Log-probabilities as recorded by the rollout.
    :param before: Log-probabilities under the weights before the update; used only by a rollout correction.
    :param moved: Whether the weights have changed since, so that without ``before`` no mismatch can be measured.
    :param token_weight: [rows] float32; `Sample.token_weight`, scaled up if a part of the batch is an optimizer step.
    :param processes: Number of processes over which the trainer averages gradients.
    :param tokens: Trained tokens of the optimizer step in all micro-batches and processes.
    :param reference: Log-probabilities under the reference model, for `use_kl_loss`.
    :param entropy: Entropy of each token's distribution; required for `entropy_coeff`, otherwise only logged.
    :raises ValueError: An enabled term lacks its input.
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
    """Return factors of a row's tokens that turn a mean over ``processes`` into ASTuner's sum."""
    return processes * token_weight


def token_mean(values: Tensor, *, processes: int, tokens: float) -> Measured:
    """Return the contribution of ``values`` [N] to a mean over all trained tokens of an optimizer step."""
    return Measured("sum", processes / max(tokens, 1) * values.detach().float().sum())
