"""Our loss inside verl's actor workers.

verl hands a micro-batch of whole rows to a function and calls ``backward`` on the scalar that it returns.  Ours is
`astuner_ray.training.loss`, which also says what becomes of it; here is only where verl keeps the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from tensordict import TensorDict
from torch import Tensor
from verl.utils.metric import Metric
from verl.workers.utils.padding import no_padding_2_padding

from astuner import TrainerCommon
from astuner_ray.training.before_update import ROW, BeforeUpdate, Mailbox
from astuner_ray.training.loss import micro_batch_loss

Loss = Callable[..., tuple[Tensor, dict[str, Metric]]]
"""(model_output, data, dp_group) -> (scalar, metrics), as verl's workers call it."""


def make_loss(settings: TrainerCommon, mailbox: Mailbox | None = None) -> Loss:
    """The loss that ``settings`` ask for, for ``actor_rollout_wg.set_loss_fn``; can be sent to other processes.

    Rows need ``response_mask``, ``rollout_log_probs``, ``old_log_probs`` (verl's, from the weights before the update),
    ``advantages``, with `use_kl_loss` ``ref_log_prob``, and ``token_weight``, one float32 per row.

    :param mailbox: gets what `astuner_ray.training.before_update` finds, by rows' `ROW`.
    """
    return partial(_loss, settings, None if mailbox is None else BeforeUpdate(mailbox.send))


def _loss(
    settings: TrainerCommon,
    watcher: BeforeUpdate | None,
    model_output: Mapping[str, Tensor],
    data: TensorDict,
    dp_group: Any = None,
) -> tuple[Tensor, dict[str, Metric]]:
    fields = ["response_mask", "rollout_log_probs", "old_log_probs", "advantages"]
    if settings.use_kl_loss:
        fields.append("ref_log_prob")
    rows = data.select(*fields).to_padded_tensor()
    logprobs = no_padding_2_padding(model_output["log_probs"], data)
    if watcher is not None:
        watcher.see(
            settings,
            rows=data[ROW],
            logprobs=logprobs,
            before=rows["old_log_probs"],
            trained=rows["response_mask"],
            rows_of_step=data["global_batch_size"] // data["dp_size"],
        )
    loss, measured = micro_batch_loss(
        settings,
        logprobs=logprobs,
        trained=rows["response_mask"],
        rollout=rows["rollout_log_probs"],
        before=rows["old_log_probs"],
        advantages=rows["advantages"],
        token_weight=data["token_weight"],
        processes=data["dp_size"],
        tokens=data["batch_num_tokens"],
        reference=rows["ref_log_prob"] if settings.use_kl_loss else None,
        entropy=no_padding_2_padding(model_output["entropy"], data) if "entropy" in model_output else None,
    )
    return loss, {name: Metric(of.how, of.value) for name, of in measured.items()}
