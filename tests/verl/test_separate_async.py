"""VERL's `separate_async` on a CPU: trainer and rollout servers share no process, and weights travel between them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..fsdp.runs import MATH_AGENT, PLAIN, Run, position, running

pytestmark = pytest.mark.timeout(2400)

SEPARATE = ("verl.trainer.v1.trainer_mode=separate_async", "verl.actor_rollout_ref.rollout.nnodes=1")
COMMON = (
    *PLAIN,
    "astuner.trainer_common.save_episodes=-1",
    "astuner.trainer_common.val_before_train=false",
    "astuner.data.max_validation_tasks=8",
)


@pytest.fixture(scope="module")
def in_step(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two workers that train, two servers that generate, and nothing begun ahead: each step has the newest weights.

    The rollout correction makes VERL compute the log-probabilities of every sample before the update.
    """
    more = [
        "astuner.trainer_common.total_steps=4",
        "astuner.trainer_common.n_gpus_per_node=2",
        "astuner.trainer_common.use_kl_loss=true",
        "astuner.trainer_common.algorithm.rollout_is=token-truncate",
        "verl.actor_rollout_ref.rollout.n_gpus_per_node=2",
        "verl.actor_rollout_ref.hybrid_engine=false",
        "verl.trainer.v1.separate_async.num_warmup_batches=0",
    ]
    folder = tmp_path_factory.mktemp("in_step") / "run"
    with running("verl", MATH_AGENT, folder, "--no-resume", *SEPARATE, *COMMON, *more) as run:
        assert run.ends() == 0, run.said()
    return run


def test_every_update_reaches_the_servers_before_the_next_step(in_step: Run) -> None:
    steps = in_step.steps()
    assert in_step.versions() == {step: {step - 1} for step in (1, 2, 3, 4)}
    assert all(row["staleness/max"] == 0 for row in steps.values())
    drift = [steps[step]["kl/ref"] for step in (1, 2, 3, 4)]
    assert drift[0] == 0 < drift[1] < drift[2] < drift[3], "the weights move away from the first ones"
    # the trainer's own log-probabilities of what the servers generated, with weights that have moved
    assert max(row["kl/mismatch_max"] for row in steps.values()) <= 1e-4


def test_the_last_weights_are_saved_and_validated(in_step: Run) -> None:
    assert in_step.saved() == ["step-000004"]
    assert in_step.resumable_at() == 4
    assert list(in_step.validations()) == [4]
    assert in_step.failures() == []


@pytest.mark.engines
def test_rollouts_ahead_of_the_trainer_are_old_and_none_is_lost_when_the_run_is_killed(tmp_path: Path) -> None:
    """One worker and one server as VERL has them: with an engine of the trainer's own for validations."""
    more = [
        "astuner.trainer_common.total_steps=8",
        "astuner.trainer_common.save_freq=3",
        "astuner.trainer_common.test_freq=2",
        "verl.actor_rollout_ref.rollout.n_gpus_per_node=1",
    ]
    with running("verl", MATH_AGENT, tmp_path / "run", "--no-resume", *SEPARATE, *COMMON, *more) as first:
        first.until(lambda: max(first.steps(), default=0) > 3)
        assert first.resumable_at() == 3
        first.killed()
    with running("verl", MATH_AGENT, tmp_path / "run", "--resume", *SEPARATE, *COMMON, *more) as run:
        assert run.ends() == 0, run.said()
    first.is_gone()
    steps = run.steps()
    assert sorted(steps) == list(range(1, 9))
    assert sorted(run.validations()) == [2, 4, 6, 8]
    trained = [position(group) for groups in run.groups().values() for group in groups]
    drawn, under_way = run.returned(8)
    assert len(trained) == 8 * 8
    assert sorted(trained + under_way) == list(range(drawn)), "every draw is trained on or comes again"
    versions = run.versions()
    assert all(versions[step] <= set(range(step)) for step in steps), "none is from the future, all are known"
    assert max(versions[8]) > max(versions[4]) > max(versions[1]) == 0, "new weights arrive"
    assert max(row["staleness/max"] for row in steps.values()) >= 1
    # nothing is ahead in the first step of either run: the same weights on both sides, in the second the saved ones
    assert versions[4] == {3}
    for step in (1, 4):
        assert steps[step]["staleness/max"] == 0
        assert steps[step]["kl/mismatch_max"] <= 1e-4
