"""Groups stay together, bad episodes stay alone, stragglers are cancelled."""

from __future__ import annotations

import asyncio
import gc

import pytest

from astuner.contracts.types import (
    Episode,
    FinishReason,
    Generation,
    JudgeOutput,
    Split,
    StopReason,
    Task,
    Turn,
    WorkflowTask,
)
from astuner.rollout.credit import Comparison
from astuner.rollout.pool import Group, RolloutPool
from tests.groups import until_enough
from tests.table import table

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
    groups = asyncio.run(until_enough(pool, DRAWS, repeat=2, needed=2))
    assert [(g.group_id, g.complete, len(g.scored)) for g in groups] == [
        ("g0", True, 2),
        ("g1", False, 0),
        ("g2", True, 2),
    ]
    assert ended.count(StopReason.CANCELLED) == 2


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


# --- whether there is something to learn -------------------------------------------------------------------------


def played(rewards: dict[str, float], *spoke: str) -> Episode:
    """An episode in which these agents, whose role is their name without its number, said something."""
    generation = Generation(
        prompt_ids=[1], response_ids=[2], logprobs=[-1.0], finish_reason=FinishReason.STOP, policy_version=0
    )
    return Episode(
        workflow_task=WorkflowTask(task=Task(task_id="t"), episode_id="e", group_id="g"),
        turns=[
            Turn(index=i, agent=agent, role=agent.rstrip("0123456789"), generation=generation, continues=None)
            for i, agent in enumerate(spoke)
        ],
        output=None,
        verdict=JudgeOutput.per_agent(rewards),
        stop_reason=StopReason.COMPLETED,
    )


def group(*episodes: Episode, by: str = "role", agents_named: bool = True) -> Group:
    comparison = Comparison(by=by, agents_named=agents_named)
    return Group(group_id="g", task=Task(task_id="t"), episodes=episodes, comparison=comparison)


def test_self_play_in_one_role_has_spread_whoever_wins() -> None:
    won, lost = played({"p1": 1, "p2": 0}, "p1", "p2"), played({"p1": 0, "p2": 1}, "p1", "p2")
    assert group(won, lost).has_spread
    assert group(won, won).has_spread  # one of the two did better than the other
    assert not group(won, won, by="agent").has_spread  # and each did as well as always
    assert group(won, lost, by="agent").has_spread


def test_a_role_that_did_not_speak_makes_no_difference() -> None:
    rewards = {"wolf": 1.0, "sheep": 1.0}
    assert not group(played(rewards, "wolf", "sheep"), played(rewards, "wolf")).has_spread
    assert not group(played({"wolf": 1.0}, "wolf"), played({"wolf": 0.0, "sheep": 1.0}, "sheep")).has_spread


@table("agents_named", [True, False])
def test_an_episode_where_nobody_spoke_is_compared_only_if_there_is_just_one_agent(agents_named: bool) -> None:
    silent = Episode(
        workflow_task=WorkflowTask(task=Task(task_id="t"), episode_id="e", group_id="g"),
        turns=(),
        output=None,
        verdict=JudgeOutput(reward=0.0),
        stop_reason=StopReason.COMPLETED,
    )
    spoke = played({"default": 1.0}, "default")
    assert group(spoke, silent, agents_named=agents_named).has_spread is not agents_named


@table("cut_short", [False, True])
def test_the_pools_groups_go_by_what_it_was_given(cut_short: bool) -> None:
    async def run(task: WorkflowTask) -> Episode:
        if cut_short and task.group_id == "g1":
            await asyncio.sleep(3600)
        return scored(task)

    comparison = Comparison(by="agent", agents_named=True)
    pool = RolloutPool(run, max_parallel=64, comparison=comparison)
    groups = asyncio.run(until_enough(pool, DRAWS, repeat=1, needed=2 if cut_short else 3))
    assert [g.complete for g in groups] == [True, not cut_short, True]
    assert {g.comparison for g in groups} == {comparison}


@table("first", ["0", "1", "3", "01", "0123"])
def test_one_error_that_all_episodes_meet_is_raised_once(first: str) -> None:
    """On a full disk nothing can be logged; asyncio must not print a traceback for every other episode."""
    printed: list[dict[str, object]] = []

    async def run(task: WorkflowTask) -> Episode:
        if task.episode_id[-1] in first:
            return scored(task)
        try:
            await asyncio.sleep(3600)
        finally:
            for _ in range(10 * (1 + int(task.group_id[-1]))):  # agents take different times to close
                await asyncio.sleep(0)
        return scored(task)

    def full(episode: Episode) -> None:
        raise OSError(28, "No space left on device")

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: printed.append(context))
        pool = RolloutPool(run, max_parallel=64, on_episode=full)
        with pytest.raises(OSError, match="No space"):
            await pool.run_groups(DRAWS, repeat=4, split=Split.TRAIN)
        for _ in range(50):
            await asyncio.sleep(0)
        gc.collect()

    asyncio.run(main())
    gc.collect()
    assert printed == []
