"""Many episodes at once, in groups.

A group is the attempts at one draw.  The pool keeps at most ``max_env_worker`` episodes running, tells a listener
about each one that ends, and hands back whole groups.  With over-sampling it stops as soon as enough groups are
complete and cancels the stragglers.  One bad episode never stops the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from astuner.types import Episode, Split, StopReason, Task, WorkflowTask

RunEpisode = Callable[[WorkflowTask], Awaitable[Episode]]
OnEpisode = Callable[[Episode], None]


@dataclass(frozen=True, kw_only=True)
class Group:
    """All attempts at one drawn task."""

    group_id: str
    task: Task
    episodes: tuple[Episode, ...]

    @property
    def scored(self) -> tuple[Episode, ...]:
        return tuple(e for e in self.episodes if e.reward is not None)


class RolloutPool:
    """Runs groups of episodes with bounded concurrency."""

    def __init__(self, run_episode: RunEpisode, *, max_parallel: int, on_episode: OnEpisode | None = None) -> None:
        self._run_episode = run_episode
        self._max_parallel = max_parallel
        self._on_episode = on_episode or (lambda episode: None)

    async def run_groups(
        self,
        draws: Sequence[tuple[str, Task]],
        *,
        repeat: int,
        split: Split,
        needed: int | None = None,
        min_scored: int = 1,
    ) -> list[Group]:
        """Run ``repeat`` attempts at every draw (group id, task).

        :param needed: return once this many groups are complete with at least ``min_scored`` scored episodes;
            episodes still running are cancelled and end as `StopReason.CANCELLED`.
        :returns: complete groups first, in order of draw; groups cut short by ``needed`` follow.
        """
        gate = asyncio.Semaphore(self._max_parallel)
        attempts = [
            [
                asyncio.ensure_future(
                    self._one(
                        gate,
                        WorkflowTask(
                            task=task,
                            episode_id=f"{group_id}-{attempt}",
                            group_id=group_id,
                            split=split,
                            attempt=attempt,
                        ),
                    )
                )
                for attempt in range(repeat)
            ]
            for group_id, task in draws
        ]
        groups = [asyncio.ensure_future(_gather(episodes)) for episodes in attempts]
        try:
            await self._wait(groups, needed, min_scored)
        finally:
            everything = [e for episodes in attempts for e in episodes]
            for episode in everything:
                episode.cancel()
            if everything:
                await asyncio.wait([*everything, *groups])
        done: list[Group] = []
        cut: list[Group] = []
        for (group_id, task), episodes in zip(draws, attempts, strict=True):
            ended = tuple(e.result() for e in episodes if not e.cancelled())
            whole = len(ended) == repeat and all(e.stop_reason is not StopReason.CANCELLED for e in ended)
            (done if whole else cut).append(Group(group_id=group_id, task=task, episodes=ended))
        return done + cut

    async def _wait(self, groups: Sequence[asyncio.Future[list[Episode]]], needed: int | None, min_scored: int) -> None:
        good = 0
        pending = set(groups)
        while pending and (needed is None or good < needed):
            finished, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            good += sum(sum(e.reward is not None for e in group.result()) >= min_scored for group in finished)

    async def _one(self, gate: asyncio.Semaphore, workflow_task: WorkflowTask) -> Episode:
        async with gate:
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
        self._on_episode(episode)
        return episode


async def _gather(episodes: Sequence[asyncio.Future[Episode]]) -> list[Episode]:
    return list(await asyncio.gather(*episodes))
