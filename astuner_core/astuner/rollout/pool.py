"""Many episodes at once, in groups.

A group is the attempts at one draw.  The pool keeps at most ``max_env_worker`` episodes running, tells a listener
about each one that ends, and hands back whole groups.  One bad episode never stops the others.

An episode whose verdict waits for its group (`astuner.rollout.judging`) has ended for the listener when it has
one; that of a group which is cut short gets none, and ends as cancelled.

Invariant: a group says that there is something to learn from it exactly when `astuner.rollout.credit` would find so.

`StepGroups` are the groups of one step: which were drawn, which came back, which can be trained on, and whether to draw
more.  It is one set of rules, whoever runs the groups.  Invariant: every draw is out, has ended, or was given back, in
exactly one of these.
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
"""Group id and task."""


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
    """Runs groups of episodes with bounded concurrency, over all groups under way."""

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

    async def run_groups(self, draws: Sequence[Draw], *, repeat: int, split: Split) -> list[Group]:
        """``repeat`` attempts at every draw: a group for each, in their order."""
        running = RunningGroups(self, repeat=repeat, split=split)
        running.begin(draws)
        try:
            by_id = {group.group_id: group for group in [await running.next_group() for _ in draws]}
        finally:
            await running.stop()
        return [by_id[group_id] for group_id, _ in draws]

    async def run_group(self, draw: Draw, *, repeat: int, split: Split) -> Group:
        """All attempts at one draw; being cancelled cuts the group short, and it is what there is of it."""
        attempts = [asyncio.ensure_future(self._one(_attempt(draw, n, split))) for n in range(repeat)]
        for attempt in attempts:
            attempt.add_done_callback(_mark_seen)
        try:
            await asyncio.wait(attempts, return_when=asyncio.FIRST_EXCEPTION)
            ended = [attempt.result() for attempt in attempts if attempt.done()]  # raises what one of them raised
            if not any(e.stop_reason is StopReason.CANCELLED for e in ended):
                return self._group(draw, ended, await self._verdicts(ended), complete=True)
        except BaseException as e:
            for attempt in attempts:
                attempt.cancel()
            await asyncio.wait(attempts)
            ended = [a.result() for a in attempts if not a.cancelled() and a.exception() is None]
            if not isinstance(e, asyncio.CancelledError):
                raise
        why = "its group was cut short before its judge could compare the attempts"
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
        """
        :param given: those in place of episodes that waited, which the listener hears of now.
        """
        for episode in given:
            self._on_episode(episode)
        by_id = {e.workflow_task.episode_id: e for e in given}
        episodes = tuple(by_id.get(e.workflow_task.episode_id, e) for e in ended)
        group_id, task = draw
        return Group(group_id=group_id, task=task, episodes=episodes, complete=complete, comparison=self._comparison)


class RunningGroups:
    """Groups of a pool that were begun, and that nobody has taken yet.

    Episodes elsewhere go on by themselves; what happens on this side (the next episode of a full pool, the end of a
    group) happens while the event loop runs, that is while `next_group` is awaited.
    """

    def __init__(
        self, pool: RolloutPool, *, repeat: int, split: Split, loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        """:param loop: the one that runs them, where `begin` is called outside of it."""
        self._pool, self._repeat, self._split, self._loop = pool, repeat, split, loop
        self._running: dict[asyncio.Task[Group], str] = {}
        self._ended: asyncio.Queue[asyncio.Task[Group]] = asyncio.Queue()
        """Those of them that have ended."""

    def begin(self, draws: Sequence[Draw]) -> None:
        """Begin a group for each draw."""
        loop = self._loop or asyncio.get_running_loop()
        for draw in draws:
            work = self._pool.run_group(draw, repeat=self._repeat, split=self._split)
            task = loop.create_task(work)
            task.add_done_callback(self._note_end)
            self._running[task] = draw[0]

    def _note_end(self, task: asyncio.Task[Group]) -> None:
        _mark_seen(task)
        if task in self._running:  # and not stopped
            self._ended.put_nowait(task)

    async def next_group(self) -> Group:
        """The next group that ends; those that ended first come first.

        :raises LookupError: none is running.
        """
        if not self._running:
            raise LookupError("no group was begun")
        done = await self._ended.get()
        del self._running[done]
        return done.result()

    async def stop(self) -> list[Group]:
        """Cut short what runs; all groups that nobody has taken, but those that raised."""
        left, self._running = list(self._running), {}
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)
        self._ended = asyncio.Queue()
        return [task.result() for task in left if not task.cancelled() and task.exception() is None]

    @property
    def under_way(self) -> list[str]:
        """The draws of the groups that nobody has taken yet."""
        return list(self._running.values())


def _mark_seen(task: asyncio.Future[Any]) -> None:
    """Keep asyncio from printing what a task raised: a full disk fails all episodes, and one error is raised."""
    if not task.cancelled():
        task.exception()


def _attempt(draw: Draw, number: int, split: Split) -> WorkflowTask:
    group_id, task = draw
    return WorkflowTask(task=task, episode_id=f"{group_id}-{number}", group_id=group_id, split=split, attempt=number)


@dataclass(frozen=True, kw_only=True)
class StepRollout:
    """The groups of one step that can be trained on."""

    step: int
    groups: tuple[Group, ...]
    scored: tuple[Scored, ...]
    metrics: dict[str, float]
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
