"""Groups that somebody else runs: kept, replaced, closed or drawn again, and each draw exactly one of these."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from astuner.contracts.errors import RunError
from astuner.contracts.types import (
    Episode,
    FinishReason,
    Generation,
    JudgeOutput,
    Split,
    StopReason,
    Turn,
    WorkflowTask,
)
from astuner.rollout.pool import Draw, Group
from astuner.runs.run import TrainingRun
from astuner.runs.run_dir import RunDir
from astuner.runs.tasks import read_tasks
from astuner_testing.fakes import fake_config

SAID = Generation(
    prompt_ids=[1, 2], response_ids=[3], logprobs=[-0.5], finish_reason=FinishReason.STOP, policy_version=0
)


def make(folder: Path, *, rollout: str = "", trainer: str = "", batch: int = 2) -> TrainingRun:
    folder.mkdir(exist_ok=True)
    (folder / "flow.py").write_text(
        "from astuner import Workflow\n"
        "class Flow(Workflow):\n"
        "    async def execute(self, workflow_task, model_tuner): ..."
    )
    (folder / "tasks.jsonl").write_text("".join(f'{{"question": "{n}?"}}\n' for n in range(20)))
    config = fake_config(
        folder,
        f"  data: {{train_batch_size: {batch}, shuffle: false}}\n"
        f"  rollout: {{workflow: flow.py->Flow, num_repeat: 2{rollout}}}\n"
        f"  trainer_common: {{total_steps: 3{trainer}}}\n"
        "  task_reader: {type: jsonl, jsonl: {training: {file_path: tasks.jsonl}}}\n",
    )
    run_dir = RunDir(folder / "run")
    run_dir.start()
    return TrainingRun(config, run_dir, read_tasks(config))


@pytest.fixture
def experiment(tmp_path: Path) -> Iterator[TrainingRun]:
    run = make(tmp_path / "one")
    yield run
    run.close()


def group(draw: Draw, *rewards: float | None) -> Group:
    group_id, task = draw
    episodes = []
    for n, reward in enumerate(rewards):
        failed = reward is None
        episodes.append(
            Episode(
                workflow_task=WorkflowTask(
                    task=task, episode_id=f"{group_id}-{n}", group_id=group_id, split=Split.TRAIN, attempt=n
                ),
                turns=() if failed else (Turn(index=0, agent="default", generation=SAID, continues=None),),
                output=None,
                verdict=None if reward is None else JudgeOutput(reward=reward),
                stop_reason=StopReason.WORKER_LOST if failed else StopReason.COMPLETED,
                error="the worker died" if failed else "",
            )
        )
    return Group(group_id=group_id, task=task, episodes=tuple(episodes))


def drawn(experiment: TrainingRun) -> list[str]:
    """What a resumed run would draw first."""
    state = experiment.state()["draws"]
    return [f"g{position:07d}.{times}" for position, times in state["returned"]]


def test_a_step_is_closed_with_the_groups_that_came(experiment):
    first, second = experiment.draw(1)
    assert experiment.end(1, group(second, 0.0, 1.0)).kept
    assert experiment.end(1, group(first, 1.0, 0.0)).kept
    assert drawn(experiment) == ["g0000000.1", "g0000001.1"]  # a kill now: both come again
    rollout = experiment.take(1, [first[0], second[0]])
    assert [g.group_id for g in rollout.groups] == [first[0], second[0]]
    assert len(rollout.scored) == 4
    assert drawn(experiment) == []


def test_a_group_that_cannot_be_trained_on_is_replaced(tmp_path):
    experiment = make(tmp_path, trainer=", algorithm: {dynamic_sampling: true, max_draws: 2}", batch=1)
    (draw,) = experiment.draw(1)
    ending = experiment.end(1, group(draw, 1.0, 1.0))
    assert not ending.kept
    assert ending.instead is not None
    assert ending.instead[0] == "g0000001"
    last = experiment.end(1, group(ending.instead, 0.0, 0.0))
    assert (last.kept, last.instead) == (False, None)  # max_draws batches were drawn
    rollout = experiment.take(1, [])
    assert rollout.groups == ()
    assert drawn(experiment) == []  # they were looked at, and are not looked at again
    experiment.close()


def test_draws_of_a_closed_step_that_never_came_are_drawn_again(tmp_path):
    experiment = make(tmp_path, rollout=", oversample: 2")
    draws = experiment.draw(1)
    assert len(draws) == 4
    for draw in draws[:3]:
        assert experiment.end(1, group(draw, 0.0, 1.0)).kept
    rollout = experiment.take(1, [draws[0][0], draws[1][0]])
    assert len(rollout.groups) == 2
    with pytest.raises(LookupError):
        experiment.end(1, group(draws[3], 0.0, 1.0))
    assert [group_id for group_id, _ in experiment.draw(2)] == ["g0000002.1", "g0000003.1", "g0000004", "g0000005"]
    experiment.close()


def test_a_world_that_fails_every_time_ends_the_run(experiment):
    first, second = experiment.draw(1)
    ending = experiment.end(1, group(first, None, None))
    assert not ending.kept
    with pytest.raises(RunError, match="4 of 4 episodes failed"):
        experiment.end(1, group(second, None, None))


def test_steps_may_overlap(experiment):
    one, two = experiment.draw(1), experiment.draw(2)
    assert experiment.end(2, group(two[0], 0.0, 1.0)).kept
    for draw in one:
        assert experiment.end(1, group(draw, 0.0, 1.0)).kept
    experiment.take(1, [d[0] for d in one])
    assert drawn(experiment) == ["g0000002.1", "g0000003.1"]
