"""What a run knows of its optimizer steps without asking the trainer: how many they are, and at what rate."""

from __future__ import annotations

from collections.abc import Sequence

from astuner import TrainerCommon, update_metrics
from astuner.contracts.types import Sample
from astuner_objectives.schedule import mean_learning_rate
from astuner_objectives.step import moves_without_advantage


class Updates:
    """The optimizer steps of a run so far."""

    def __init__(self, common: TrainerCommon, *, done: int, total_steps: int) -> None:
        """:param done: optimizer steps that a run which is being continued has behind it.
        :param total_steps: of the run.
        """
        self.done = done
        self._common = common
        self._total = total_steps * common.mini_batch_num * common.ppo_epochs

    @property
    def drops_zero_advantage(self) -> bool:
        """Whether a sample with advantage 0 carries no gradient, so that it need not be computed."""
        algorithm = self._common.algorithm
        extra = moves_without_advantage(self._common) or algorithm.use_kl_in_reward
        return algorithm.filter_zero_advantage and not extra

    def take(self, kept: Sequence[Sample], mini_batches: int) -> dict[str, float]:
        """Count those of one update, and what a log says of it; with nothing to learn from there are none.

        :param kept: the samples that are trained on.
        :param mini_batches: that each pass over them is cut into.
        """
        common = self._common
        learns = bool(kept) and (any(s.advantage for s in kept) or moves_without_advantage(common))
        numbers = dict(update_metrics(kept, common.ppo_epochs, learns=learns))
        if learns:
            steps = mini_batches * common.ppo_epochs
            numbers["lr"] = mean_learning_rate(common.optim, self.done, steps, self._total)
            self.done += steps
        return numbers
