"""ASTuner's loss for Trinity's trainer, in place of Trinity's policy losses.

Trinity loads these classes by their dotted paths.  Its wrapper around a policy loss (``trinity.trainer.verl.losses``)
passes padded rows of a micro-batch, selected from VERL's batch by `TokenLoss.select_keys`, and subtracts the value of
the entropy function; VERL sums and averages the result as described in `astuner_ray.training.loss`.  Trinity's base
class for policy losses is not used, because it reads the keys from a signature, so they cannot depend on settings.

A row needs VERL's ``response_mask``, ``rollout_log_probs``, ``old_log_probs`` and ``advantages``, and as custom fields
of the experience ``token_weight`` and, if the run has an episode log, `ROW`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trinity.algorithm import AlgorithmType

from astuner import TrainerCommon
from astuner_objectives.step import entropy_gradient
from astuner_ray.training.loss import Measured, RowLoss, row_weights, token_mean

if TYPE_CHECKING:
    from torch import Tensor
    from verl.utils.metric import Metric

    from astuner_ray.training.before_update import Found


class EpisodeAlgorithm(AlgorithmType):
    """Algorithm whose advantages are ready when the trainer reads a batch, without a reference model."""

    use_critic = False
    use_reference = False
    compute_advantage_in_trainer = False
    can_balance_batch = True  # the order of rows has no meaning
    schema = "experience"

    @classmethod
    def default_config(cls) -> dict[str, Any]:
        """Return defaults of keys below Trinity's ``algorithm``; the loss has no default there."""
        return {
            "policy_loss_fn": f"{__name__}.TokenLoss",
            "kl_penalty_fn": "none",
            "kl_loss_fn": "none",  # KL is part of the policy loss
            "entropy_loss_fn": "none",
        }


class EpisodeAlgorithmWithReference(EpisodeAlgorithm):
    """The same algorithm with the initial weights as reference model, for `use_kl_loss`."""

    use_reference = True


class TokenLoss:
    """Trinity's ``algorithm.policy_loss_fn``: policy loss and KL of `astuner_objectives.step`.

    `Entropy` adds the entropy bonus.

    :param backend: Trinity's trainer; only VERL is supported.
    :param settings: ``trainer_common`` without keys of plugins, as returned by ``model_dump(mode="json")``.
    :raises ValueError: Another trainer.
    """

    def __init__(self, backend: str = "verl", *, settings: Mapping[str, Any]) -> None:
        if backend != "verl":
            raise ValueError(f"trinity.trainer.trainer_type is {backend}, but ASTuner trains with verl: remove the key")
        common = TrainerCommon.model_validate(dict(settings)).model_copy(update={"entropy_coeff": 0.0})
        self._loss = RowLoss(common, _hand_in if common.save_tokens else None)
        self.select_keys = [*self._loss.columns, *self._loss.told]
        """Columns to select from VERL's batch."""

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        """Return no defaults, so that Trinity requires ``settings``."""
        return {}

    def __call__(self, logprob: Tensor, **picked: Any) -> tuple[Tensor, dict[str, Metric]]:
        """Return the loss and the metrics of a micro-batch."""
        loss, measured = self._loss(logprob, picked, picked)
        return loss, {name: _metric(of) for name, of in measured.items()}


class Entropy:
    """Trinity's ``algorithm.entropy_loss_fn``: the entropy metric, and the bonus that Trinity subtracts.

    :param entropy_coef: `entropy_coeff`.
    """

    def __init__(self, entropy_coef: float) -> None:
        self._coefficient = entropy_coef

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        """Return no defaults, so that Trinity requires the coefficient."""
        return {}

    def __call__(
        self,
        entropy: Tensor,
        action_mask: Tensor,
        *,
        token_weight: Tensor,
        dp_size: int,
        batch_num_tokens: float,
        **trinity_passes_more: Any,
    ) -> tuple[Tensor, dict[str, Metric]]:
        """Return the bonus and the metric of a micro-batch; ``entropy`` and ``action_mask`` are [rows, response]."""
        of_trained = entropy[action_mask]
        if not self._coefficient:  # metric only; even a zero gradient becomes NaN with an infinite logit
            of_trained = of_trained.detach()
        weight = row_weights(token_weight, dp_size)[action_mask.nonzero()[:, 0]]
        bonus = self._coefficient * (weight * of_trained).sum()
        measured = {"entropy": token_mean(of_trained, processes=dp_size, tokens=batch_num_tokens)}
        if self._coefficient:
            size = entropy_gradient(self._coefficient, of_trained, weight)
            measured["logit_grad/entropy"] = Measured("sum", size)
        return bonus, {name: _metric(of) for name, of in measured.items()}


def _hand_in(step: int, found: Found) -> None:
    from astuner_trinity import mailbox
    from astuner_trinity.session import Session

    mailbox.hand_in(Session.trainer_logprobs, step, found)


def _metric(measured: Measured) -> Metric:
    from verl.utils.metric import Metric

    return Metric(measured.how, measured.value)
