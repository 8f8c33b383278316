"""The stream of draws, the books of failures, and the numbers of a step."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astuner.contracts.errors import DataError
from astuner.contracts.statistics import wilson_interval
from astuner.contracts.types import (
    Episode,
    FinishReason,
    Generation,
    JudgeOutput,
    StopReason,
    Task,
    Turn,
    WorkflowTask,
)
from astuner.rollout.credit import Comparison
from astuner.rollout.metrics import rollout_metrics
from astuner.rollout.pool import Group
from astuner.runs.run import FailureLedger
from astuner.runs.tasks import TaskSampler
from tests.table import table

TASKS = [Task(task_id=str(i)) for i in range(7)]


def test_every_epoch_draws_every_task_once_in_another_order() -> None:
    sampler = TaskSampler(TASKS, seed=1)
    epochs = [[task.task_id for _, task in sampler.draw(7)] for _ in range(3)]
    assert all(Counter(e) == Counter(t.task_id for t in TASKS) for e in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_without_shuffling_the_order_is_the_readers() -> None:
    assert [t.task_id for _, t in TaskSampler(TASKS, seed=1, shuffle=False).draw(9)] == list("012345601")


@given(st.integers(0, 40), st.integers(1, 9), st.integers(0, 5))
def test_a_restored_position_goes_on_with_the_same_draws(position: int, n: int, seed: int) -> None:
    whole = TaskSampler(TASKS, seed=seed).draw(position + n)[position:]
    before = TaskSampler(TASKS, seed=seed)
    before.draw(position)
    resumed = TaskSampler(TASKS, seed=seed)
    resumed.restore(json.loads(json.dumps(before.state())))
    assert resumed.draw(n) == whole


def test_draws_that_were_cut_short_come_again_under_a_new_name() -> None:
    sampler = TaskSampler(TASKS, seed=0)
    first = sampler.draw(4)
    sampler.give_back([first[1][0], first[3][0]])
    resumed = TaskSampler(TASKS, seed=0)
    resumed.restore(json.loads(json.dumps(sampler.state())))
    again = resumed.draw(3)
    assert [task for _, task in again[:2]] == [first[1][1], first[3][1]]
    assert not {group for group, _ in again} & {group for group, _ in first}
    resumed.give_back([again[0][0]])
    assert resumed.draw(1)[0][0] not in {again[0][0], first[1][0]}


def test_every_draw_is_a_group_of_its_own() -> None:
    ids = [group for group, _ in TaskSampler(TASKS[:1], seed=0).draw(5)]
    assert len(set(ids)) == 5


def test_no_tasks_is_an_error_that_says_so() -> None:
    with pytest.raises(DataError, match="no training tasks"):
        TaskSampler([], seed=0)


def test_failures_are_counted_and_written_down_with_their_reason(tmp_path: Path) -> None:
    ledger = FailureLedger(tmp_path / "failures.jsonl")
    task = WorkflowTask(task=Task(task_id="t7"), episode_id="e", group_id="g")
    ledger.episode(
        3,
        Episode(
            workflow_task=task,
            turns=(),
            output=None,
            verdict=None,
            stop_reason=StopReason.JUDGE_FAILED,
            error="no",
            retries=2,
        ),
    )
    ledger.dropped_group(3, "g", "0 of 8 episodes were scored")
    assert ledger.counts == {"judge_failed": 1, "retries": 2, "dropped_groups": 1}
    rows = [json.loads(line) for line in (tmp_path / "failures.jsonl").read_text().splitlines()]
    assert rows[0]["task_id"] == "t7"
    assert rows[0]["error"] == "no"
    assert rows[1]["dropped"].startswith("0 of 8")
    again = FailureLedger()
    again.restore(ledger.state())
    assert again.counts == ledger.counts


@table(("k", "n", "low", "high"), [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (10, 10, 0.7225, 1.0)])
def test_wilson_interval_matches_the_published_table(k: int, n: int, low: float, high: float) -> None:
    assert wilson_interval(k, n) == pytest.approx((low, high), abs=1e-4)


# --- the numbers of a step ---------------------------------------------------------------------------------------


def turn(index: int, agent: str = "a", continues: int | None = None, **more: Any) -> Turn:
    generation = Generation(
        prompt_ids=[7], response_ids=[8], logprobs=[-1.0], finish_reason=FinishReason.STOP, policy_version=0
    )
    return Turn(index=index, agent=agent, generation=generation, continues=continues, **more)


def group(*verdicts: JudgeOutput, turns: list[Turn], by: str = "role") -> Group:
    episodes = [
        Episode(
            workflow_task=WorkflowTask(task=TASKS[0], episode_id=f"g-{i}", group_id="g"),
            turns=turns,
            output=None,
            verdict=verdict,
            stop_reason=StopReason.COMPLETED,
        )
        for i, verdict in enumerate(verdicts)
    ]
    comparison = Comparison(by=by, agents_named=True)
    return Group(group_id="g", task=TASKS[0], episodes=tuple(episodes), comparison=comparison)


def test_groups_without_a_difference_are_counted_by_who_is_compared_with_whom() -> None:
    players = [turn(0, "p1", role="player"), turn(1, "p2", role="player")]
    always = [JudgeOutput.per_agent({"p1": 1.0, "p2": 0.0})] * 2
    swapped = [always[0], JudgeOutput.per_agent({"p1": 0.0, "p2": 1.0})]
    for by, zero in (("role", 0.0), ("agent", 0.5)):
        step = [group(*always, turns=players, by=by), group(*swapped, turns=players, by=by)]
        assert rollout_metrics(step)["adv/zero_group_frac"] == zero


def test_calls_that_cannot_be_read_and_what_was_passed_over_are_counted() -> None:
    turns = [
        turn(0, message={"content": "a", "unparsed_tool_calls": ["{"]}, notes={"endpoint/left_out/mood": 2}),
        turn(1, message={"content": "b"}, notes={"endpoint/left_out/mood": 1, "endpoint/overruled/seed": 1}),
    ]
    metrics = rollout_metrics([group(*[JudgeOutput(reward=1.0)] * 2, turns=turns)])
    assert metrics["tool_calls/malformed_frac"] == 0.5
    assert {name: n for name, n in metrics.items() if name.startswith("endpoint/")} == {
        "endpoint/left_out/mood": 6.0,
        "endpoint/overruled/seed": 2.0,
    }


def test_a_roles_mean_reward_counts_every_agent_of_an_episode_and_every_episode_once() -> None:
    team = [turn(i, f"w{i}", role="wolf") for i in range(3)]
    shared, apart = JudgeOutput.per_agent({"wolf": 0.0}), JudgeOutput.per_agent({"w0": 1.0, "w1": 1.0, "w2": 0.4})
    assert rollout_metrics([group(apart, turns=team)])["reward/wolf/mean"] == pytest.approx(0.8)
    both = rollout_metrics([group(shared, turns=team[:1]), group(apart, turns=team)])
    assert both["reward/wolf/mean"] == pytest.approx(0.4)
    plain = rollout_metrics([group(JudgeOutput(reward=1.0), turns=team)])
    assert "reward/wolf/mean" not in plain
