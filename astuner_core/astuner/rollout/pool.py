"""Many episodes at once, in groups.

A group is the attempts at one draw.  The pool keeps at most ``max_env_worker`` episodes running, tells a listener
about each one that ends, and hands back whole groups.  With over-sampling it stops as soon as enough groups are
complete and cancels the stragglers.  One bad episode never stops the others.

An episode whose verdict waits for its group (`astuner.rollout.group_judging`) has ended for the listener when it has
one; that of a group which is cut short gets none, and ends as cancelled.

Invariant: a group says that there is something to learn from it exactly when `astuner.rollout.credit` would find so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from astuner.contracts.types import Episode, Split, StopReason, Task, WorkflowTask
from astuner.rollout.credit import Comparison, Scored, has_spread
from astuner.rollout.group_judging import closed, is_open

RunEpisode = Callable[[WorkflowTask], Awaitable[Episode]]
JudgeGroup = Callable[[Sequence[Episode]], Awaitable[Sequence[Episode]]]
OnEpisode = Callable[[Episode], None]


@dataclass(frozen=True, kw_only=True)
class Group:
    """All attempts at one drawn task."""

    group_id: str
    task: Task
    episodes: tuple[Episode, ...]
    complete: bool = True
    """False: cut short, since enough other groups were complete. Its fast attempts alone would bias towards brevity."""

    comparison: Comparison = field(default_factory=Comparison)
    """Who in it is compared with whom."""

    @property
    def scored(self) -> tuple[Episode, ...]:
        return tuple(e for e in self.episodes if e.reward is not None)

    @property
    def has_spread(self) -> bool:
        """Whether there is something to learn: the rewards of some agents that are compared with each other differ."""
        named = self.comparison.agents_named
        return has_spread([Scored.of(e, (), agents_named=named) for e in self.scored], self.comparison.by)


class RolloutPool:
    """Runs groups of episodes with bounded concurrency, over all calls of `run_groups` under way."""

    def __init__(
        self,
        run_episode: RunEpisode,
        *,
        max_parallel: int,
        on_episode: OnEpisode | None = None,
        comparison: Comparison | None = None,
        judge_group: JudgeGroup | None = None,
    ) -> None:
        """
        :param comparison: what the groups are to go by; None: by role, in an experiment that names no agents.
        :param judge_group: gives the open episodes of a group their verdicts; None: an episode has its own.
        """
        self._comparison = comparison or Comparison()
        self._run_episode = run_episode
        self._judge_group = judge_group
        self._gate = asyncio.Semaphore(max_parallel)
        self._on_episode = on_episode or (lambda episode: None)

    async def run_groups(
        self,
        draws: Sequence[tuple[str, Task]],
        *,
        repeat: int,
        split: Split,
        needed: int | None = None,
        is_useful: Callable[[Group], bool] = lambda group: True,
    ) -> list[Group]:
        """Run ``repeat`` attempts at every draw (group id, task).

        :param needed: return once this many groups are complete and useful; what still runs then is cancelled and
            ends as `StopReason.CANCELLED`.
        :returns: a group per draw, in order of draw.
        """
        attempts = [
            [asyncio.ensure_future(self._one(_attempt(draw, n, split))) for n in range(repeat)] for draw in draws
        ]
        groups = [
            asyncio.ensure_future(self._gather(draw, episodes)) for draw, episodes in zip(draws, attempts, strict=True)
        ]
        everything = [e for episodes in attempts for e in episodes]
        cut: dict[int, Group] = {}
        try:
            await _wait(groups, needed, is_useful)
        finally:
            for group, episodes in zip(groups, attempts, strict=True):
                if self._is_being_judged(episodes):
                    group.cancel()
            for episode in everything:
                episode.cancel()
            if everything:
                await asyncio.wait([*everything, *groups])
            for task in (*everything, *groups):
                if not task.cancelled():
                    task.exception()  # seen: the first one is raised below, and the others are of the same making
            for place, (draw, group, episodes) in enumerate(zip(draws, groups, attempts, strict=True)):
                if group.cancelled():
                    cut[place] = self._cut(draw, episodes)
        return [cut[place] if place in cut else group.result() for place, group in enumerate(groups)]

    async def _one(self, workflow_task: WorkflowTask) -> Episode:
        async with self._gate:
            try:
                episode = await self._run_episode(workflow_task)
            except asyncio.CancelledError:
                episode = Episode(
                    workflow_task=workflow_task,
                    turns=(),
                    output=None,
                    verdict=None,
                    stop_reason=StopReason.CANCELLED,
                    error="no longer needed, or the run was interrupted",
                )
        if not self._waits(episode):
            self._on_episode(episode)
        return episode

    def _waits(self, episode: Episode) -> bool:
        return self._judge_group is not None and is_open(episode)

    def _is_being_judged(self, episodes: Sequence[asyncio.Future[Episode]]) -> bool:
        whole = all(e.done() and not e.cancelled() and e.exception() is None for e in episodes)
        return whole and any(self._waits(e.result()) for e in episodes)

    async def _gather(self, draw: tuple[str, Task], episodes: Sequence[asyncio.Future[Episode]]) -> Group:
        ended = await asyncio.gather(*episodes)
        if any(e.stop_reason is StopReason.CANCELLED for e in ended):
            return self._group(draw, self._unjudged(ended), complete=False)
        return self._group(draw, await self._judged(ended), complete=True)

    def _cut(self, draw: tuple[str, Task], episodes: Sequence[asyncio.Future[Episode]]) -> Group:
        ended = [e.result() for e in episodes if not e.cancelled() and e.exception() is None]
        return self._group(draw, self._unjudged(ended), complete=False)

    async def _judged(self, episodes: Sequence[Episode]) -> Sequence[Episode]:
        waiting = [e for e in episodes if self._waits(e)]
        if self._judge_group is None or not waiting:
            return episodes
        return self._now_ended(episodes, await self._judge_group(waiting))

    def _unjudged(self, episodes: Sequence[Episode]) -> Sequence[Episode]:
        why = "its group was cut short before its judge could compare the attempts"
        return self._now_ended(episodes, [closed(e, StopReason.CANCELLED, why) for e in episodes if self._waits(e)])

    def _now_ended(self, episodes: Sequence[Episode], closed: Sequence[Episode]) -> Sequence[Episode]:
        """The episodes with those in place that waited, which the listener hears of now."""
        for episode in closed:
            self._on_episode(episode)
        by_id = {e.workflow_task.episode_id: e for e in closed}
        return [by_id.get(e.workflow_task.episode_id, e) for e in episodes]

    def _group(self, draw: tuple[str, Task], episodes: Sequence[Episode], *, complete: bool) -> Group:
        group_id, task = draw
        return Group(
            group_id=group_id, task=task, episodes=tuple(episodes), complete=complete, comparison=self._comparison
        )


def _attempt(draw: tuple[str, Task], number: int, split: Split) -> WorkflowTask:
    group_id, task = draw
    return WorkflowTask(task=task, episode_id=f"{group_id}-{number}", group_id=group_id, split=split, attempt=number)


async def _wait(
    groups: Sequence[asyncio.Future[Group]], needed: int | None, is_useful: Callable[[Group], bool]
) -> None:
    useful, pending = 0, set(groups)
    while pending and (needed is None or useful < needed):
        finished, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        useful += sum(group.result().complete and is_useful(group.result()) for group in finished)
