"""Groups begun before they are wanted: taken in the order they end, replaced when they are no use, never lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from astuner.contracts.errors import RunError
from astuner.contracts.types import (
    Episode,
    FinishReason,
    Generation,
    JudgeOutput,
    SamplingParams,
    StopReason,
    Turn,
    WorkflowTask,
)
from astuner.runs.run import TrainingRun
from astuner.runs.run_dir import RunDir
from astuner.runs.tasks import read_tasks
from astuner_testing.fakes import fake_config

SAID = Generation(
    prompt_ids=[1, 2], response_ids=[3], logprobs=[-0.5], finish_reason=FinishReason.STOP, policy_version=0
)


class Elsewhere:
    """An `EpisodeHost`: rewards by attempt, and groups whose episodes fail."""

    def __init__(
        self,
        *,
        broken: Callable[[str], bool] = lambda group: False,
        equal: Callable[[str], bool] = lambda group: False,
        slow: Callable[[str], bool] = lambda group: False,
    ) -> None:
        self.ran: list[str] = []
        self.broken, self.equal, self.slow = broken, equal, slow

    async def run(self, workflow_task: WorkflowTask, sampling: SamplingParams) -> Episode:
        self.ran.append(workflow_task.episode_id)
        if self.slow(workflow_task.group_id):
            await asyncio.sleep(3600)
        if self.broken(workflow_task.group_id):
            return Episode(
                workflow_task=workflow_task,
                turns=(),
                output=None,
                verdict=None,
                stop_reason=StopReason.WORKER_LOST,
                error="the worker died",
            )
        return Episode(
            workflow_task=workflow_task,
            turns=(Turn(index=0, agent="default", generation=SAID, continues=None),),
            output=None,
            verdict=JudgeOutput(reward=0.0 if self.equal(workflow_task.group_id) else float(workflow_task.attempt)),
            stop_reason=StopReason.COMPLETED,
        )


@pytest.fixture
def experiment(tmp_path: Path) -> Iterator[TrainingRun]:
    run = make(tmp_path)
    yield run
    run.close()


def make(tmp_path: Path, *, rollout: str = "", trainer: str = "") -> TrainingRun:
    (tmp_path / "flow.py").write_text(
        "from astuner import Workflow\n"
        "class Flow(Workflow):\n"
        "    async def execute(self, workflow_task, model_tuner): ..."
    )
    (tmp_path / "tasks.jsonl").write_text("".join(f'{{"question": "{n}?"}}\n' for n in range(20)))
    config = fake_config(
        tmp_path,
        "  data: {train_batch_size: 2, shuffle: false}\n"
        f"  rollout: {{workflow: flow.py->Flow, num_repeat: 2{rollout}}}\n"
        f"  trainer_common: {{total_steps: 3{trainer}}}\n"
        "  task_reader: {type: jsonl, jsonl: {training: {file_path: tasks.jsonl}}}\n",
    )
    run_dir = RunDir(tmp_path / "run")
    run_dir.start()
    return TrainingRun(config, run_dir, read_tasks(config))


def test_what_was_begun_is_taken_and_the_rest_waits(experiment: TrainingRun) -> None:
    host = Elsewhere()
    experiment.prefetch(host, 4)
    first, second = experiment.rollout(host, 1), experiment.rollout(host, 2)
    assert [g.group_id for g in (*first.groups, *second.groups)] == ["g0000000", "g0000001", "g0000002", "g0000003"]
    assert len(host.ran) == 8
    assert len(experiment.rollout(host, 3).groups) == 2  # none was begun: as many as it needs are


def test_a_group_that_cannot_be_trained_on_is_replaced_and_counted(experiment: TrainingRun) -> None:
    host = Elsewhere(broken=lambda group: group == "g0000000")
    experiment.prefetch(host, 2)
    rollout = experiment.rollout(host, 1)
    assert [g.group_id for g in rollout.groups] == ["g0000001", "g0000002"]
    assert experiment.ledger.counts["dropped_groups"] == 1


def test_a_world_that_always_fails_is_not_asked_for_ever(experiment: TrainingRun) -> None:
    host = Elsewhere(broken=lambda group: True)
    experiment.prefetch(host, 2)
    with pytest.raises(RunError, match=r"4 of 4 episodes failed.*worker_lost: the worker died"):
        experiment.rollout(host, 1)


def test_draws_that_nobody_took_come_again_after_a_resume(experiment: TrainingRun) -> None:
    host = Elsewhere()
    experiment.prefetch(host, 5)
    experiment.rollout(host, 1)
    state = json.loads(json.dumps(experiment.state()))
    experiment.restore(state, 1)
    again = [group for group, _ in experiment.sampler.draw(4)]
    assert again == ["g0000002.1", "g0000003.1", "g0000004.1", "g0000005"]


def test_a_step_that_is_waited_for_runs_others_in_place_of_groups_with_equal_rewards(tmp_path: Path) -> None:
    run = make(tmp_path, trainer=", algorithm: {dynamic_sampling: true, max_draws: 2}")
    host = Elsewhere(equal=lambda group: group in ("g0000000", "g0000002"))
    assert [g.group_id for g in run.rollout(host, 1).groups] == ["g0000001", "g0000003"]
    host = Elsewhere(equal=lambda group: True)
    assert run.rollout(host, 2).groups == ()
    assert len(host.ran) == 8, "two batches of two groups, and no more"
    run.close()


def test_a_step_that_is_waited_for_cuts_stragglers_short_and_draws_them_again(tmp_path: Path) -> None:
    run = make(tmp_path, rollout=", oversample: 2")
    rollout = run.rollout(Elsewhere(slow=lambda group: group == "g0000001"), 1)
    assert [g.group_id for g in rollout.groups] == ["g0000000", "g0000002"]
    assert run.ledger.counts["cancelled"] == 2
    assert [group for group, _ in run.sampler.draw(2)] == ["g0000001.1", "g0000004"]
    run.close()


def test_groups_that_nobody_took_are_ended_and_drawn_again(experiment: TrainingRun) -> None:
    host = Elsewhere(slow=lambda group: group == "g0000002")
    experiment.prefetch(host, 3)
    experiment.rollout(host, 1)
    experiment.prefetch(host, 0)
    assert [group for group, _ in experiment.sampler.draw(2)] == ["g0000002.1", "g0000003"]
    experiment.prefetch(host, 1)
    assert len(experiment.rollout(host, 2).groups) == 2
