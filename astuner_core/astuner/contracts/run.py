"""What a backbone drives: the tasks, the episodes and the credit of one run, and what is written down of it.

A backbone's loop reads: roll out, assign credit, update, publish the step, validate, save.  Everything here is the same
for all backbones; everything about weights is theirs.  There are three ways to have a step's groups: `Run.rollout` runs
them while it is waited for; with `Run.prefetch` they are begun before; and a trainer with a scheduler of its own asks
for draws (`Run.draw`), reports each group (`Run.end`) and takes those it trains on (`Run.take`).
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
    """One run of one config, as `Backbone.train` gets it."""

    config: Config
    run_dir: RunDir
    """Where it writes; a backbone saves below it."""
    runner: EpisodeRunner
    """Runs an episode where the models are; picklable, so that a worker can be handed one."""
    interrupt: Interrupt
    """Whether the person asked to stop, and what that cancels."""
    resume_from: Path | None
    """The newest whole state, or None for a fresh start. A backbone loads weights from it, then calls `restore`."""
    total_steps: int
    """Of the whole run."""
    validation_tasks: Sequence[Task]

    def check_stop(self) -> None:
        """Before a step.

        :raises astuner.contracts.errors.Interrupted: the person asked to stop.
        :raises astuner.contracts.errors.AstunerError: a subscriber wants it to stop, e.g. for an alarm that
            `sentinel.stop_on` names.
        """

    def is_due(self, what: str, step: int) -> bool:
        """Whether ``save``, ``test`` or ``resume`` happens after ``step``; the last step does all three.

        ``test`` is due where there are tasks for it, once: a run that is resumed does not repeat it.
        """

    def rollout(self, models: Models | EpisodeHost, step: int) -> StepRollout:
        """The groups of a step that can be trained on: those of `prefetch` that ended, or they are run now.

        With dynamic sampling, another group is run for each that cannot be trained on, while fewer than
        `algorithm.max_draws` batches were drawn; then there are fewer groups.

        :param models: policy -> engine and codec (see `astuner.rollout.models.one_model`), or where episodes run.
        :raises astuner.contracts.errors.RunError: more episodes failed than `rollout.max_failed_share` allows.
        :raises astuner.contracts.errors.Interrupted: the person asked to stop.
        """

    def prefetch(self, host: EpisodeHost, groups: int) -> None:
        """Have at least this many groups under way, for later calls of `rollout`; 0 ends those that nobody took.

        What ``host`` runs goes on while the caller does other things.

        :param host: the same in every call, here and to `rollout`.
        """

    def draw(self, step: int, split: Split = Split.TRAIN) -> list[Draw]:
        """The draws of a step, once: more than its batch needs with `rollout.oversample`; or all validation tasks.

        They are for whoever runs them himself, and tells of each episode (`EpisodeEnded`) and group (`end`).
        """

    def end(self, step: int, group: Group) -> Ending:
        """A group of `draw` came back whole. With the last one of a validation, that is published.

        :raises LookupError: nobody waits for it: its step was closed without it.
        :raises astuner.contracts.errors.RunError: more episodes failed than `rollout.max_failed_share` allows.
        """

    def take(self, step: int, group_ids: Collection[str]) -> StepRollout:
        """A step's batch is made of these groups; its other draws, cut short or late, will be drawn again.

        :raises astuner.contracts.errors.RunError: more episodes failed than `rollout.max_failed_share` allows.
        """

    def credit(
        self, rollout: StepRollout, *, policy_version: int, penalties: Penalties | None = None
    ) -> tuple[list[Sample], Metrics]:
        """Samples with advantages and token weights, and what they look like; called again, it replaces the first.

        :param penalties: (episode id, agent) -> what is subtracted from its reward, such as a KL term.
        """

    def validate(self, models: Models | EpisodeHost, step: int) -> Evaluation | None:
        """Measure the policy on all validation tasks; None when there are none. Raises as `rollout`."""

    def try_out(self, models: Models, *, tasks: int, max_parallel: int) -> list[Episode]:
        """One episode of each of the first training tasks, for looking at; nothing is trained or dropped."""

    def publish(self, event: Event) -> None:
        """Tell the run's subscribers: `StepEnded` with a step's numbers, `Note`, `Saving`, `TokenizersLoaded`, …

        :raises OSError: something cannot be written that the run cannot do without.
        """

    def state(self) -> dict[str, Any]:
        """Everything but weights that a resumed run needs; JSON-serialisable, saved with the weights."""

    def restore(self, state: Mapping[str, Any], step: int) -> None:
        """Continue after ``step``: what is drawn and counted, and the folder's files, are as they were then."""
