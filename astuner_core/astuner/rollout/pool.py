"""Many episodes at once, in groups.

A group is the attempts at one draw.  The pool keeps at most ``max_env_worker`` episodes running, tells a listener
about each one that ends, and hands back whole groups.  One bad episode never stops the others.

An episode whose verdict waits for its group (`astuner.rollout.judging`) has ended for the listener when it has
one; that of a group which is cut short gets none, and ends as cancelled.

Invariant: a group says that there is something to learn from it exactly when `astuner.rollout.credit` would find so.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from astuner.contracts.types import Episode, Split, StopReason, Task, WorkflowTask
from astuner.rollout.credit import Comparison, Scored, has_spread
from astuner.rollout.judging import closed, is_open

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

    async def run_groups(
        self,
        draws: Sequence[Draw],
        *,
        repeat: int,
        split: Split,
        needed: int | None = None,
        is_useful: Callable[[Group], bool] = lambda group: True,
    ) -> list[Group]:
        """Run ``repeat`` attempts at every draw.

        :param needed: return once this many groups are complete and useful; what still runs then is cut short.
        :returns: a group per draw, in order of draw.
        """
        running = RunningGroups(self, repeat=repeat, split=split)
        running.begin(draws)
        found: list[Group] = []
        useful = 0
        try:
            while running.under_way and (needed is None or useful < needed):
                found.append(await running.next_group())
                useful += found[-1].complete and is_useful(found[-1])
        finally:
            found += await running.stop()
        by_id = {group.group_id: group for group in found}
        return [by_id[group_id] for group_id, _ in draws]

    async def run_group(self, draw: Draw, *, repeat: int, split: Split) -> Group:
        """All attempts at one draw; being cancelled cuts the group short, and it is what there is of it."""
        attempts = [asyncio.ensure_future(self._one(_attempt(draw, n, split))) for n in range(repeat)]
        try:
            await asyncio.wait(attempts, return_when=asyncio.FIRST_EXCEPTION)
            ended = [attempt.result() for attempt in attempts if attempt.done()]  # raises what one of them raised
            if not any(e.stop_reason is StopReason.CANCELLED for e in ended):
                return self._group(draw, ended, await self._verdicts(ended), complete=True)
        except asyncio.CancelledError:
            for attempt in attempts:
                attempt.cancel()
            await asyncio.wait(attempts)
            ended = [a.result() for a in attempts if not a.cancelled() and a.exception() is None]
        except BaseException:
            for attempt in attempts:
                attempt.cancel()
            await asyncio.wait(attempts)
            for attempt in attempts:
                if not attempt.cancelled():
                    attempt.exception()  # seen: one is raised, the others are of the same making
            raise
        why = "its group was cut short before its judge could compare the attempts"
        given = [closed(e, StopReason.CANCELLED, why) for e in ended if self._waits(e)]
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
        return self._judge_group is not None and is_open(episode)

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
        self._ended: deque[asyncio.Task[Group]] = deque()
        """Those of them that have ended."""
        self._one_ended = asyncio.Event()

    def begin(self, draws: Sequence[Draw]) -> None:
        """Begin a group for each draw."""
        loop = self._loop or asyncio.get_running_loop()
        for draw in draws:
            work = self._pool.run_group(draw, repeat=self._repeat, split=self._split)
            task = loop.create_task(work)
            task.add_done_callback(self._note_end)
            self._running[task] = draw[0]

    def _note_end(self, task: asyncio.Task[Group]) -> None:
        if task in self._running:  # and not stopped
            self._ended.append(task)
            self._one_ended.set()

    async def next_group(self) -> Group:
        """The next group that ends; those that ended first come first.

        :raises LookupError: none is running.
        """
        if not self._running:
            raise LookupError("no group was begun")
        while not self._ended:
            self._one_ended.clear()
            await self._one_ended.wait()
        done = self._ended.popleft()
        del self._running[done]
        return done.result()

    async def stop(self) -> list[Group]:
        """Cut short what runs; all groups that nobody has taken, but those that raised."""
        left, self._running = list(self._running), {}
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)
        self._ended.clear()
        return [task.result() for task in left if not task.cancelled() and task.exception() is None]

    @property
    def under_way(self) -> list[str]:
        """The draws of the groups that nobody has taken yet."""
        return list(self._running.values())


def _attempt(draw: Draw, number: int, split: Split) -> WorkflowTask:
    group_id, task = draw
    return WorkflowTask(task=task, episode_id=f"{group_id}-{number}", group_id=group_id, split=split, attempt=number)
