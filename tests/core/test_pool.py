"""Groups stay together, bad episodes stay alone, stragglers are cancelled."""

from __future__ import annotations

import asyncio

import pytest

from astuner.rollout.pool import RolloutPool
from astuner.types import Episode, JudgeOutput, Split, StopReason, Task, WorkflowTask

DRAWS = [(f"g{i}", Task(task_id=str(i))) for i in range(3)]


def scored(task: WorkflowTask, reward: float = 1.0) -> Episode:
    return Episode(
        workflow_task=task, turns=(), output=None, verdict=JudgeOutput(reward=reward), stop_reason=StopReason.COMPLETED
    )


def test_groups_come_back_whole_in_order_and_every_ending_is_told() -> None:
    ended: list[str] = []

    async def run(task: WorkflowTask) -> Episode:
        await asyncio.sleep(0)
        return scored(task)

    pool = RolloutPool(run, max_parallel=2, on_episode=lambda e: ended.append(e.workflow_task.episode_id))
    groups = asyncio.run(pool.run_groups(DRAWS, repeat=2, split=Split.TRAIN))
    assert [[e.workflow_task.episode_id for e in g.episodes] for g in groups] == [
        ["g0-0", "g0-1"],
        ["g1-0", "g1-1"],
        ["g2-0", "g2-1"],
    ]
    assert sorted(ended) == sorted(e.workflow_task.episode_id for g in groups for e in g.episodes)


def test_no_more_than_max_parallel_run_at_once() -> None:
    running, most = 0, 0

    async def run(task: WorkflowTask) -> Episode:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        return scored(task)

    asyncio.run(RolloutPool(run, max_parallel=2).run_groups(DRAWS, repeat=4, split=Split.TRAIN))
    assert most == 2


def test_oversampling_stops_at_enough_groups_and_cancels_the_stragglers() -> None:
    async def run(task: WorkflowTask) -> Episode:
        if task.group_id == "g1":
            await asyncio.sleep(3600)
        return scored(task)

    ended: list[StopReason] = []
    pool = RolloutPool(run, max_parallel=64, on_episode=lambda e: ended.append(e.stop_reason))
    groups = asyncio.run(pool.run_groups(DRAWS, repeat=2, split=Split.TRAIN, needed=2))
    assert [(g.group_id, g.complete, len(g.scored)) for g in groups] == [
        ("g0", True, 2),
        ("g1", False, 0),
        ("g2", True, 2),
    ]
    assert ended.count(StopReason.CANCELLED) == 2


def test_a_group_whose_episodes_fail_does_not_count_as_enough() -> None:
    async def run(task: WorkflowTask) -> Episode:
        if task.group_id == "g0":
            return Episode(
                workflow_task=task, turns=(), output=None, verdict=None, stop_reason=StopReason.WORKFLOW_FAILED
            )
        await asyncio.sleep(0.001)
        return scored(task)

    groups = asyncio.run(
        RolloutPool(run, max_parallel=64).run_groups(
            DRAWS, repeat=1, split=Split.TRAIN, needed=2, is_useful=lambda g: len(g.scored) >= 1
        )
    )
    assert sum(len(g.scored) for g in groups) == 2


def test_cancelling_the_pool_leaves_nothing_running() -> None:
    async def run(task: WorkflowTask) -> Episode:
        await asyncio.sleep(3600)
        return scored(task)

    async def main() -> int:
        work = asyncio.ensure_future(RolloutPool(run, max_parallel=2).run_groups(DRAWS, repeat=2, split=Split.TRAIN))
        await asyncio.sleep(0.01)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        return len(asyncio.all_tasks()) - 1

    assert asyncio.run(main()) == 0
