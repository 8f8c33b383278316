"""Groups that somebody else runs: a trainer with a scheduler of its own, whose workers take draws and bring groups.

A draw belongs to the step whose batch it was made for.  It is out until its group comes back, then it waits for its
step to be closed; a group that cannot be trained on is replaced by another draw while there are any to be had.
Invariant: every draw is out, waiting, closed or given back, in exactly one of these.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from astuner.contracts.types import Task
from astuner.rollout.pool import Group

if TYPE_CHECKING:
    from astuner.runs.experiment import Experiment, StepRollout

Draw = tuple[str, Task]
"""Group id and task."""


@dataclass
class _Step:
    out: set[str]
    left: int
    """Draws that may still be made to replace others."""
    waiting: dict[str, Group] = field(default_factory=dict)
    ended: list[Group] = field(default_factory=list)
    """All that came back, those that cannot be trained on too."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """What is to become of a group that ended."""

    kept: bool
    """Whether it is to be trained on."""
    instead: Draw | None = None
    """A draw to run in its place."""


class StepsElsewhere:
    """The draws of an experiment's steps that are not closed yet."""

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment
        self._steps: dict[int, _Step] = {}

    def draw(self, step: int) -> list[Draw]:
        """The draws of a step, once; more than its batch needs with ``rollout.oversample``."""
        a = self._experiment.config.astuner
        draws = self._experiment.sampler.draw(math.ceil(a.data.train_batch_size * a.rollout.oversample))
        algorithm = a.trainer_common.algorithm
        again = algorithm.max_draws - 1 if algorithm.dynamic_sampling else 0  # as `Experiment.rollout` has it
        self._steps[step] = _Step(out={d[0] for d in draws}, left=len(draws) * again)
        return draws

    def end(self, step: int, group: Group) -> Ending:
        """Take a group that came back whole.

        :raises LookupError: nobody waits for it: its step was closed without it.
        :raises RunError: more episodes failed than `rollout.max_failed_share` allows.
        """
        experiment, of = self._experiment, self._steps.get(step)
        if of is None or group.group_id not in of.out:
            raise LookupError(f"group {group.group_id} of step {step}")
        of.out.remove(group.group_id)
        of.ended.append(group)
        batch = experiment.config.astuner.data.train_batch_size
        if kept := group.complete and experiment.is_useful(group):
            of.waiting[group.group_id] = group
        experiment.books.progress(step, min(len(of.waiting), batch), batch, "groups")
        if len(of.ended) - len(of.waiting) >= batch:
            experiment.check_failures(step, of.ended)  # or a broken world would be asked for ever
        if kept or not of.left:
            return Ending(kept=kept)
        of.left -= 1
        draw = experiment.sampler.draw(1)[0]
        of.out.add(draw[0])
        return Ending(kept=False, instead=draw)

    def out(self, step: int) -> int:
        """How many draws of a step have not come back."""
        return len(self._steps[step].out)

    def close(self, step: int, group_ids: Collection[str], started: float) -> StepRollout:
        """A step's batch is made of these groups; its other draws, cut short or late, will be drawn again.

        :param started: when its draws were made, by `time.perf_counter`.
        :raises RunError: more episodes failed than `rollout.max_failed_share` allows.
        """
        of = self._steps.pop(step)
        kept = [of.waiting.pop(i) for i in group_ids if i in of.waiting]
        late = {*of.out, *of.waiting}
        self._experiment.sampler.give_back(sorted(late))
        return self._experiment.enter(step, [g for g in of.ended if g.group_id not in late], kept, started)

    def under_way(self) -> Iterator[str]:
        """Draws of steps that are not closed: who resumes draws them again."""
        for of in self._steps.values():
            yield from sorted({*of.out, *of.waiting})
