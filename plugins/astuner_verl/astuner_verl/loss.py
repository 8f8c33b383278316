"""Our loss inside verl's actor workers.

verl hands a micro-batch of whole rows to a function and calls ``backward`` on the scalar that it returns.  Ours is
`astuner.objective.token_losses`, weighted and added up as in every other backbone, so nothing of verl's own losses,
aggregation modes or clipping takes part.

verl averages gradients over its data-parallel workers, while our weights are those of a sum over the whole batch:
so the loss is multiplied by their number.  Metrics go the same way, as verl averages what workers report: a mean over
tokens is exact over micro-batches and workers within one optimizer step, and over the steps of a batch verl takes
the mean of the means.  One number means less in a batch of several steps: without a rollout correction nobody keeps
the log-probabilities from before the update, so ``kl/mismatch_*`` then include how far the weights have moved.

Invariant: a row whose mask is zero (verl adds some to fill a batch) changes neither loss, gradient nor metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from tensordict import TensorDict
from torch import Tensor
from verl.utils.metric import Metric
from verl.workers.utils.padding import no_padding_2_padding

from astuner.config.schema import TrainerCommon
from astuner.objective import old_logprobs, token_losses

Loss = Callable[..., tuple[Tensor, dict[str, Metric]]]
"""(model_output, data, dp_group) -> (scalar, metrics), as verl's workers call it."""


def make_loss(settings: TrainerCommon) -> Loss:
    """The loss that ``settings`` ask for, for ``actor_rollout_wg.set_loss_fn``; can be sent to other processes.

    Rows need ``response_mask``, ``rollout_log_probs``, ``old_log_probs`` (verl's, from the weights before the update),
    ``advantages``, with `use_kl_loss` ``ref_log_prob``, and ``token_weight``: one float32 per row,
    `Sample.token_weight` times what a part of the batch is scaled up by when it is an optimizer step of its own.
    """
    return partial(_loss, settings)


def _loss(
    settings: TrainerCommon, model_output: Mapping[str, Tensor], data: TensorDict, dp_group: Any = None
) -> tuple[Tensor, dict[str, Metric]]:
    fields = ["response_mask", "rollout_log_probs", "old_log_probs", "advantages"]
    if settings.use_kl_loss:
        fields.append("ref_log_prob")
    rows = data.select(*fields).to_padded_tensor()
    trained = rows["response_mask"].bool()

    def of_model(name: str) -> Tensor:
        padded: Tensor = no_padding_2_padding(model_output[name], data)
        return padded[trained]

    owner = trained.nonzero()[:, 0]
    logprobs = of_model("log_probs")
    entropy = of_model("entropy") if "entropy" in model_output else None
    rollout = rows["rollout_log_probs"][trained]
    old = old_logprobs(settings.algorithm, rollout=rollout, before=rows["old_log_probs"][trained])
    losses = token_losses(
        settings,
        logprobs=logprobs,
        rollout=rollout,
        old=old,
        advantage=rows["advantages"][trained],
        owner=owner,
        reference=rows["ref_log_prob"][trained] if settings.use_kl_loss else None,
        entropy=entropy,
    )
    weight = data["dp_size"] * data["token_weight"][owner]
    gap = ((logprobs.detach() if old is rollout else old) - rollout).abs()
    means = {
        "kl/mismatch_mean": gap,
        "rollout_is/weight": losses.correction,
        "kl/ref": losses.kl,
        "entropy": entropy,
        "ratio/mean": losses.ratio,
        "clip_frac/low": losses.clipped_low,
        "clip_frac/high": losses.clipped_high,
    }
    share = data["dp_size"] / max(data["batch_num_tokens"], 1)  # trained tokens of the step, over all workers
    metrics = {"pg_loss": Metric("sum", (weight * losses.policy).sum())}
    metrics |= {name: Metric("sum", share * of.sum()) for name, of in means.items() if of is not None}
    metrics |= {
        name: Metric("max", of.max() if len(of) else 0.0)
        for name, of in (("kl/mismatch_max", gap), ("ratio/max", losses.ratio))
    }
    return (weight * losses.total).sum(), metrics
