"""Run many episodes concurrently, in groups.

A group contains all attempts at one draw. The pool runs at most ``max_env_worker`` episodes at a time, notifies a
listener when an episode ends, and returns complete groups. A failed episode never stops the others.

An episode whose verdict depends on its group (`astuner.rollout.judging`) counts as ended once it has a verdict. In a
cancelled group it gets none and ends as cancelled.

Invariant: `Group.has_spread` is true exactly if `astuner.rollout.credit` finds a nonzero advantage.

`StepGroups` tracks the groups of one step: drawn, returned and useful for training, and whether to draw more. The rules
are the same wherever the groups run. Invariant: every draw is in progress, ended, or given back, and in exactly one of
these states.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from astuner.contracts.types import Episode, Split, StopReason, Task, WorkflowTask
from astuner.rollout.credit import Comparison, Scored, has_spread

RunEpisode = Callable[[WorkflowTask], Awaitable[Episode]]
JudgeGroup = Callable[[Sequence[Episode]], Awaitable[Sequence[Episode]]]
OnEpisode = Callable[[Episode], None]
Draw: TypeAlias = tuple[str, Task]
"""Group ID and task."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """All attempts at one draw."""

    group_id: str
    task: Task
    episodes: tuple[Episode, ...]
    complete: bool = True
    """False if it was cancelled because enough other groups were complete. Its fast attempts alone would bias towards
    short episodes."""

    comparison: Comparison = field(default_factory=Comparison)
    """Which agents of the group are compared with each other."""

    @property
    def scored(self) -> tuple[Episode, ...]:
        return tuple(e for e in self.episodes if e.reward is not None)

    @property
    def has_spread(self) -> bool:
        """Whether there is a learning signal: rewards of agents that are compared with each other differ."""
        named = self.comparison.agents_named
        return has_spread([Scored.of(e, (), agents_named=named) for e in self.scored], self.comparison.by)


class RolloutPool:
    """Runs groups of episodes with bounded concurrency over all groups in progress."""

    def __init__(
        self,
        run_episode: RunEpisode,
        *,
        max_parallel: int,
        on_episode: OnEpisode | None = None,
        comparison: Comparison | None = None,
        judge_group: JudgeGroup | None = None,
    ) -> None:
        """Create a pool.

        :param comparison: Comparison within groups; None compares by role, in an experiment that names no agents.
        :param judge_group: Judges the open episodes of a group; None if episodes are judged individually.
        """
        self._comparison = comparison or Comparison()
        self._run_episode = run_episode
        self._judge_group = judge_group
        self._gate = asyncio.Semaphore(max_parallel)
        self._on_episode = on_episode or (lambda episode: None)

    async def run_groups(self, draws: Sequence[Draw], *, repeat: int, split: Split) -> list[Group]:
        """Run ``repeat`` attempts at every draw and return one group per draw, in order."""
        running = RunningGroups(self, repeat=repeat, split=split)
        running.begin(draws)
        try:
            by_id = {group.group_id: group for group in [await running.next_group() for _ in draws]}
        finally:
            await running.stop()
        return [by_id[group_id] for group_id, _ in draws]

    async def run_group(self, draw: Draw, *, repeat: int, split: Split) -> Group:
        """Run all attempts at one draw. On cancellation, return the incomplete group."""
        attempts = [asyncio.ensure_future(self._one(_attempt(draw, n, split))) for n in range(repeat)]
        for attempt in attempts:
            attempt.add_done_callback(_mark_seen)
        try:
            await asyncio.wait(attempts, return_when=asyncio.FIRST_EXCEPTION)
            ended = [attempt.result() for attempt in attempts if attempt.done()]  # raises the error of an attempt
            if not any(e.stop_reason is StopReason.CANCELLED for e in ended):
                return self._group(draw, ended, await self._verdicts(ended), complete=True)
        except BaseException as e:
            for attempt in attempts:
                attempt.cancel()
            await asyncio.wait(attempts)
            ended = [a.result() for a in attempts if not a.cancelled() and a.exception() is None]
            if not isinstance(e, asyncio.CancelledError):
                raise
        why = "its group was cancelled before its judge could compare the attempts"
        given = [e.closed(StopReason.CANCELLED, why) for e in ended if self._waits(e)]
        return self._group(draw, ended, given, complete=False)

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
        return self._judge_group is not None and episode.is_open

    async def _verdicts(self, ended: Sequence[Episode]) -> Sequence[Episode]:
        waiting = [e for e in ended if self._waits(e)]
        return await self._judge_group(waiting) if self._judge_group is not None and waiting else ()

    def _group(self, draw: Draw, ended: Sequence[Episode], given: Sequence[Episode], *, complete: bool) -> Group:
        """Return the group, after notifying the listener of judged episodes.

        :param given: Judged episodes, which replace the ones that waited for a verdict.
        """
        for episode in given:
            self._on_episode(episode)
        by_id = {e.workflow_task.episode_id: e for e in given}
        episodes = tuple(by_id.get(e.workflow_task.episode_id, e) for e in ended)
        group_id, task = draw
        return Group(group_id=group_id, task=task, episodes=episodes, complete=complete, comparison=self._comparison)


class RunningGroups:
    """Groups of a pool that were started and not yet taken.

    Episodes on other machines progress independently. Work in this process (starting the next episode of a full pool,
    ending a group) progresses only while the event loop runs, that is, while `next_group` is awaited.
    """

    def __init__(
        self, pool: RolloutPool, *, repeat: int, split: Split, loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        """Create an empty set of groups.

        :param loop: Event loop of the groups, if `begin` is called outside of it.
        """
        self._pool, self._repeat, self._split, self._loop = pool, repeat, split, loop
        self._running: dict[asyncio.Task[Group], str] = {}
        self._ended: asyncio.Queue[asyncio.Task[Group]] = asyncio.Queue()
        """Groups that have ended."""

    def begin(self, draws: Sequence[Draw]) -> None:
        """Start a group for each draw."""
        loop = self._loop or asyncio.get_running_loop()
        for draw in draws:
            work = self._pool.run_group(draw, repeat=self._repeat, split=self._split)
            task = loop.create_task(work)
            task.add_done_callback(self._note_end)
            self._running[task] = draw[0]

    def _note_end(self, task: asyncio.Task[Group]) -> None:
        _mark_seen(task)
        if task in self._running:  # otherwise it was stopped
            self._ended.put_nowait(task)

    async def next_group(self) -> Group:
        """Return the next group to end, in the order of ending.

        :raises LookupError: No group is running.
        """
        if not self._running:
            raise LookupError("no group was started")
        done = await self._ended.get()
        del self._running[done]
        return done.result()

    async def stop(self) -> list[Group]:
        """Cancel running groups. Return all groups that were not taken, except groups that raised."""
        left, self._running = list(self._running), {}
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)
        self._ended = asyncio.Queue()
        return [task.result() for task in left if not task.cancelled() and task.exception() is None]

    @property
    def under_way(self) -> list[str]:
        """Draws of the groups that were not taken yet."""
        return list(self._running.values())


def _mark_seen(task: asyncio.Future[Any]) -> None:
    """Mark a task's exception as retrieved: a full disk fails all episodes, but only one error should be shown."""
    if not task.cancelled():
        task.exception()


def _attempt(draw: Draw, number: int, split: Split) -> WorkflowTask:
    group_id, task = draw
    return WorkflowTask(task=task, episode_id=f"{group_id}-{number}", group_id=group_id, split=split, attempt=number)


@dataclass(frozen=True, kw_only=True)
class StepRollout:
    """Groups of one step that can be trained on."""

    step: int
    groups: tuple[Group, ...]
    scored: tuple[Scored, ...]
    metrics: dict[str, float]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Ending:
    """Decision about a group that ended."""

    kept: bool
    """Whether it can be trained on."""
    instead: Draw | None = None
    """Draw to run in its place."""


@dataclass(kw_only=True)
class StepGroups:
    """Groups of a step whose batch is incomplete."""

    step: int
    size: int
    """Number of groups in the batch."""
    most: int
    """Maximum number of draws."""
    out: set[str] = field(default_factory=set)
    """Draws that have not returned."""
    ended: list[Group] = field(default_factory=list)
    useful: dict[str, Group] = field(default_factory=dict)
    """Ended groups that can be trained on."""
    made: int = 0
    """Number of draws made."""
    began: float = field(default_factory=time.perf_counter)

    def drawn(self, draws: Collection[Draw]) -> None:
        """Add draws that will run for the step."""
        self.out |= {group_id for group_id, _ in draws}
        self.made += len(draws)

    def end(self, group: Group, *, is_useful: bool, draw: Callable[[], Draw]) -> Ending:
        """Record a group that returned.

        :param draw: Makes a replacement for a group that cannot be trained on.
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
        """Whether the batch is complete."""
        return len(self.useful) >= self.size
