"""The groups of one step: which were drawn, which came back, which of them can be trained on, and whether to draw more.

It is one set of rules, whoever runs the groups.  Invariant: every draw is out, has ended, or was given back, in exactly
one of these.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from astuner.rollout.credit import Scored
from astuner.rollout.metrics import Metrics
from astuner.rollout.pool import Draw, Group


@dataclass(frozen=True, kw_only=True)
class StepRollout:
    """The groups of one step that can be trained on."""

    step: int
    groups: tuple[Group, ...]
    scored: tuple[Scored, ...]
    metrics: Metrics
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Ending:
    """What is to become of a group that ended."""

    kept: bool
    """Whether it can be trained on."""
    instead: Draw | None = None
    """A draw to run in its place."""


@dataclass(kw_only=True)
class StepGroups:
    """The groups of a step whose batch is not made yet."""

    step: int
    size: int
    """Groups of its batch."""
    most: int
    """Draws that may be made for it."""
    out: set[str] = field(default_factory=set)
    """Draws that have not come back."""
    ended: list[Group] = field(default_factory=list)
    useful: dict[str, Group] = field(default_factory=dict)
    """Those of them that can be trained on."""
    made: int = 0
    """Draws that were made for it."""
    began: float = field(default_factory=time.perf_counter)

    def drawn(self, draws: Collection[Draw]) -> None:
        """These are to be run for the step."""
        self.out |= {group_id for group_id, _ in draws}
        self.made += len(draws)

    def end(self, group: Group, *, is_useful: bool, draw: Callable[[], Draw]) -> Ending:
        """A group came back.

        :param draw: makes another one, for a group that cannot be trained on.
        """
        self.out.discard(group.group_id)
        self.ended.append(group)
        if is_useful:
            self.useful[group.group_id] = group
        if is_useful or self.made >= self.most:
            return Ending(kept=is_useful)
        instead = draw()
        self.drawn([instead])
        return Ending(kept=False, instead=instead)

    @property
    def is_whole(self) -> bool:
        """Whether there are as many groups as its batch has."""
        return len(self.useful) >= self.size
