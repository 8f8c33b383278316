"""Interface of a run for backbones: tasks, episodes, credit assignment and records.

A backbone's loop is: roll out, assign credit, update, publish the step, validate, save. The run implements everything
except the weights. A backbone can get the groups of a step in three ways: `Run.rollout` runs them and waits;
`Run.prefetch` starts them earlier; a trainer with its own scheduler requests draws (`Run.draw`), reports each group
(`Run.end`) and selects the groups to train on (`Run.take`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from astuner.contracts.events import Event
from astuner.contracts.interrupt import Interrupt
from astuner.contracts.types import Episode, Sample, Split, Task

if TYPE_CHECKING:
    from astuner.config import Config
    from astuner.rollout.credit import Penalties
    from astuner.rollout.metrics import Evaluation, Metrics
    from astuner.rollout.models import EpisodeHost, Models
    from astuner.rollout.pool import Draw, Ending, Group, StepRollout
    from astuner.rollout.runner import EpisodeRunner
    from astuner.runs.run_dir import RunDir


@runtime_checkable
class Run(Protocol):
    """One run of a config, as passed to `Backbone.train`."""

    config: Config
    run_dir: RunDir
    """Run folder; a backbone saves below it."""
    runner: EpisodeRunner
    """Runs episodes; picklable, so that workers can use it."""
    interrupt: Interrupt
    """The user's request to stop, and the operation that it cancels."""
    resume_from: Path | None
    """Newest intact state, or None for a new run. A backbone loads weights from it and then calls `restore`."""
    total_steps: int
    """Number of steps of the complete run."""
    validation_tasks: Sequence[Task]

    def check_stop(self) -> None:
        """Raise if the run must stop; call it before each step.

        :raises astuner.contracts.errors.Interrupted: The user requested a stop.
        :raises astuner.contracts.errors.AstunerError: A subscriber requested a stop, e.g. for an alarm in
            `sentinel.stop_on`.
        """

    def is_due(self, what: str, step: int) -> bool:
        """Return whether ``save``, ``test`` or ``resume`` is due after ``step``; after the last step, all are.

        ``test`` requires validation tasks and is due only once per step, also in a resumed run.
        """

    def rollout(self, models: Models | EpisodeHost, step: int) -> StepRollout:
        """Return the trainable groups of a step: finished groups of `prefetch`, or groups that run now.

        With dynamic sampling, each group that cannot be trained on is replaced by another one, up to
        `algorithm.max_draws` batches. After that, the step has fewer groups.

        :param models: Policy -> engine and codec (see `astuner.rollout.models.one_model`), or the host of episodes.
        :raises astuner.contracts.errors.RunError: More episodes failed than `rollout.max_failed_share` allows.
        :raises astuner.contracts.errors.Interrupted: The user requested a stop.
        """

    def prefetch(self, host: EpisodeHost, groups: int) -> None:
        """Start groups for later calls of `rollout`, so that at least ``groups`` of them run; 0 cancels unused ones.

        ``host`` runs them in the background.

        :param host: Host of the episodes, the same in every call of this method and `rollout`.
        """

    def draw(self, step: int, split: Split = Split.TRAIN) -> list[Draw]:
        """Return the draws of a step (extra ones with `rollout.oversample`) or all validation tasks. Call it once.

        The caller runs them and reports each episode (`EpisodeEnded`) and each group (`end`).
        """

    def end(self, step: int, group: Group) -> Ending:
        """Report a complete group of `draw`. After the last group of a validation, publish the validation.

        :raises LookupError: The group's step was closed without it.
        :raises astuner.contracts.errors.RunError: More episodes failed than `rollout.max_failed_share` allows.
        """

    def take(self, step: int, group_ids: Collection[str]) -> StepRollout:
        """Build the batch of a step from these groups. The step's other draws are drawn again later.

        :raises astuner.contracts.errors.RunError: More episodes failed than `rollout.max_failed_share` allows.
        """

    def credit(
        self, rollout: StepRollout, *, policy_version: int, penalties: Penalties | None = None
    ) -> tuple[list[Sample], Metrics]:
        """Return samples with advantages and token weights, and their metrics. A second call replaces the first.

        :param penalties: (episode ID, agent) -> value to subtract from the reward, such as a KL term.
        """

    def validate(self, models: Models | EpisodeHost, step: int) -> Evaluation | None:
        """Evaluate the policy on all validation tasks; None without tasks. Raises the errors of `rollout`."""

    def try_out(self, models: Models, *, tasks: int, max_parallel: int) -> list[Episode]:
        """Run one episode of each of the first training tasks for inspection, without training or dropping any."""

    def publish(self, event: Event) -> None:
        """Send an event to the run's subscribers, e.g. `StepEnded`, `Note`, `Saving` or `TokenizersLoaded`.

        :raises OSError: An essential subscriber cannot write its data.
        """

    def state(self) -> dict[str, Any]:
        """Return the JSON-serializable state that a resumed run needs besides weights, to save with them."""

    def restore(self, state: Mapping[str, Any], step: int) -> None:
        """Continue after ``step`` with the draws, counters and files of that time."""
