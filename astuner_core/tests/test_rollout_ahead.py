"""Groups begun before they are wanted: taken in the order they end, replaced when they are no use, never lost."""

from __future__ import annotations

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
from astuner.testing.fakes import fake_config

SAID = Generation(
    prompt_ids=[1, 2], response_ids=[3], logprobs=[-0.5], finish_reason=FinishReason.STOP, policy_version=0
)


class Elsewhere:
    """An `EpisodeHost`: rewards by attempt, and groups whose episodes fail."""

    def __init__(self, *, broken: Callable[[str], bool] = lambda group: False) -> None:
        self.ran: list[str] = []
        self.broken = broken

    async def run(self, workflow_task: WorkflowTask, sampling: SamplingParams) -> Episode:
        self.ran.append(workflow_task.episode_id)
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
            verdict=JudgeOutput(reward=float(workflow_task.attempt)),
            stop_reason=StopReason.COMPLETED,
        )


@pytest.fixture
def experiment(tmp_path: Path) -> Iterator[TrainingRun]:
    (tmp_path / "flow.py").write_text(
        "from astuner import Workflow\n"
        "class Flow(Workflow):\n"
        "    async def execute(self, workflow_task, model_tuner): ..."
    )
    (tmp_path / "tasks.jsonl").write_text("".join(f'{{"question": "{n}?"}}\n' for n in range(20)))
    config = fake_config(
        tmp_path,
        "  data: {train_batch_size: 2, shuffle: false}\n"
        "  rollout: {workflow: flow.py->Flow, num_repeat: 2}\n"
        "  trainer_common: {total_steps: 3}\n"
        "  task_reader: {type: jsonl, jsonl: {training: {file_path: tasks.jsonl}}}\n",
    )
    run_dir = RunDir(tmp_path / "run")
    run_dir.start()
    run = TrainingRun(config, run_dir, read_tasks(config))
    yield run
    run.close()


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
