"""What Trinity's trainer computes with: our loss where it has policy losses of its own.

Trinity finds these classes by their dotted paths.  Its wrapper around a policy loss (``trinity.trainer.verl.losses``)
hands over padded rows of a micro-batch, picked from VERL's batch by `TokenLoss.select_keys`, and subtracts what the
entropy function returns; VERL adds up and averages the result as `astuner_ray.training.loss` says.  Trinity's own base
class for policy losses is not used: it reads the keys from a signature, so none can depend on the settings.

A row needs VERL's ``response_mask``, ``rollout_log_probs``, ``old_log_probs`` and ``advantages``, and as custom fields
of the experience ``token_weight`` and, where the run has an episode log, `ROW`.
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
    """Advantages are ready when the trainer reads a batch, and there is no reference model."""

    use_critic = False
    use_reference = False
    compute_advantage_in_trainer = False
    can_balance_batch = True  # the order of rows means nothing to us
    schema = "experience"

    @classmethod
    def default_config(cls) -> dict[str, Any]:
        """Of keys below Trinity's ``algorithm`` that the config leaves out; the loss must be there."""
        return {
            "policy_loss_fn": f"{__name__}.TokenLoss",
            "kl_penalty_fn": "none",
            "kl_loss_fn": "none",  # ours is in the loss
            "entropy_loss_fn": "none",
        }


class EpisodeAlgorithmWithReference(EpisodeAlgorithm):
    """The same with the starting weights as a reference model, for `use_kl_loss`."""

    use_reference = True


class TokenLoss:
    """Trinity's ``algorithm.policy_loss_fn``: policy loss and KL of `astuner_objectives.step`; the entropy is
    `Entropy`'s.

    :param backend: Trinity's trainer; VERL is the only one that has what we need.
    :param settings: ``trainer_common`` without the keys that packages add, as ``model_dump(mode="json")`` gives it.
    :raises ValueError: another trainer.
    """

    def __init__(self, backend: str = "verl", *, settings: Mapping[str, Any]) -> None:
        if backend != "verl":
            raise ValueError(f"trinity.trainer.trainer_type is {backend}, and ASTuner trains with verl: leave it out")
        common = TrainerCommon.model_validate(dict(settings)).model_copy(update={"entropy_coeff": 0.0})
        self._loss = RowLoss(common, _hand_in if common.save_tokens else None)
        self.select_keys = [*self._loss.columns, *self._loss.told]
        """What is picked from VERL's batch."""

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        """What Trinity passes when ``policy_loss_fn_args`` is missing: nothing, and ``settings`` is then demanded."""
        return {}

    def __call__(self, logprob: Tensor, **picked: Any) -> tuple[Tensor, dict[str, Metric]]:
        """The micro-batch's scalar and metrics."""
        loss, measured = self._loss(logprob, picked, picked)
        return loss, {name: _metric(of) for name, of in measured.items()}


class Entropy:
    """Trinity's ``algorithm.entropy_loss_fn``: the entropy for the log, and the bonus that Trinity subtracts.

    :param entropy_coef: `entropy_coeff`.
    """

    def __init__(self, entropy_coef: float) -> None:
        self._coefficient = entropy_coef

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        """What Trinity passes when ``entropy_loss_fn_args`` is missing: nothing, and the coefficient is demanded."""
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
        """The micro-batch's bonus and metric; ``entropy`` and ``action_mask`` are [rows, response]."""
        of_trained = entropy[action_mask]
        if not self._coefficient:  # logged only: not even a gradient of 0, which an infinite logit makes NaN
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
