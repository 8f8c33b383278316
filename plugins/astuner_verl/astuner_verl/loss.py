"""ASTuner's loss inside VERL's actor workers.

VERL passes a micro-batch of rows to a function and calls ``backward`` on the scalar that it returns.  The computation
is in `astuner_ray.training.loss`; this module only reads VERL's row format.
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
from astuner_ray.training.before_update import Found
from astuner_ray.training.loss import RowLoss


def make_loss(
    settings: TrainerCommon, send: Callable[[int, Found], None] | None = None
) -> Callable[..., tuple[Tensor, dict[str, Metric]]]:
    """Return the loss for ``settings``, to pass to ``actor_rollout_wg.set_loss_fn``; see `RowLoss`."""
    return partial(_loss, RowLoss(settings, send))


def _loss(
    loss: RowLoss, model_output: Mapping[str, Tensor], data: TensorDict, dp_group: Any = None
) -> tuple[Tensor, dict[str, Metric]]:
    columns = data.select(*loss.columns).to_padded_tensor()
    logprobs = no_padding_2_padding(model_output["log_probs"], data)
    entropy = no_padding_2_padding(model_output["entropy"], data) if "entropy" in model_output else None
    scalar, measured = loss(logprobs, columns, data, entropy)
    return scalar, {name: Metric(of.how, of.value) for name, of in measured.items()}
