"""What stands between Trinity and the run, without Ray: experiences, credit, batches, the mailbox, the session."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray import cloudpickle
from trinity.common.experience import EID, Experience

from astuner import RunDir
from astuner.builtin.console import JsonlSink
from astuner.contracts.errors import RunError
from astuner.contracts.types import (
    Episode,
    FinishReason,
    Generation,
    JudgeOutput,
    Sample,
    Split,
    StopReason,
    Turn,
    WorkflowTask,
)
from astuner.rollout.pool import Group
from astuner.runs.run import TrainingRun
from astuner.runs.tasks import read_tasks
from astuner_ray.training.before_update import ROW, row_id
from astuner_testing.fakes import fake_config
from astuner_trinity import experiences, launch, mailbox
from astuner_trinity.experiences import BATCH_SIZE, Credited, nothing, of_episode, sample_of
from astuner_trinity.session import Request, Session

SAID = Generation(
    prompt_ids=[1, 2], response_ids=[3, 4], logprobs=[-0.5, -0.25], finish_reason=FinishReason.STOP, policy_version=0
)


def episode(draw: Any, number: int, reward: float) -> Episode:
    group_id, task = draw
    return Episode(
        workflow_task=WorkflowTask(
            task=task, episode_id=f"{group_id}-{number}", group_id=group_id, split=Split.TRAIN, attempt=number
        ),
        turns=(Turn(index=0, agent="default", generation=SAID, continues=None),),
        output=None,
        verdict=JudgeOutput(reward=reward),
        stop_reason=StopReason.COMPLETED,
    )


def group(draw: Any, *rewards: float) -> Group:
    return Group(group_id=draw[0], task=draw[1], episodes=tuple(episode(draw, n, r) for n, r in enumerate(rewards)))


# ------------------------------------------------------------------------------------------- experiences and batches


def sample(**changes: Any) -> Sample:
    settings = {
        "episode_id": "g-0",
        "group_id": "g",
        "agent": "a",
        "input_ids": [1, 2, 3, 4, 5, 6],
        "loss_mask": [0, 0, 1, 0, 0, 1],
        "logprobs": [0.0, 0.0, -0.5, 0.0, 0.0, -0.25],
        "policy_version": 3,
        "reward": 0.5,
    }
    return Sample(**{**settings, **changes})


def test_an_experience_has_the_samples_tokens_and_trains_what_the_model_generated() -> None:
    one, two = of_episode(episode(("g", None), 2, 1.0), [sample(), sample(loss_mask=[0, 1, 0, 0, 0, 0])])
    assert one.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert one.prompt_length == 2
    assert one.action_mask.tolist() == [True, False, False, True]
    assert one.logprobs.tolist() == [-0.5, 0.0, 0.0, -0.25]
    assert (one.eid.task, one.eid.run, one.eid.step) == ("g", 2, 0)
    assert (two.prompt_length, two.eid.step) == (1, 1)
    assert [sample_of(e) for e in (one, two)] == [("g-0", 0), ("g-0", 1)]
    assert sample_of(nothing()) is None
    assert not nothing().action_mask.any()


def exps(count: int) -> list[Experience]:
    """A batch of step 7: groups of two episodes with one sample each, and one group that brought nothing."""
    found = []
    for n in range(count):
        made = of_episode(episode((f"g{n // 2}", None), n % 2, 1.0), [sample(episode_id=f"g{n // 2}-{n % 2}")])
        found += made
    found.append(nothing("g9"))
    for e in found:
        e.eid = EID(batch=7, task=e.eid.task, run=e.eid.run, step=e.eid.step)
    return Experience.deserialize_many(Experience.serialize_many(found))


def credited(monkeypatch: pytest.MonkeyPatch, reply: dict[Any, Credited], multiple: int) -> tuple[list[Any], Any]:
    asked: list[Any] = []

    async def ask(*request: Any) -> Any:
        asked.append(request)
        return reply

    monkeypatch.setattr(mailbox, "ask", ask)
    kept, _ = asyncio.run(experiences.CreditOperator(multiple).process(exps(4)))
    return kept, asked


def test_a_batch_gets_the_runs_credit_and_is_filled_up_to_what_the_workers_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reply = {
        ("g0-0", 0): Credited(1.5, 0.25, 0),
        ("g1-1", 0): Credited(-1.5, 0.5, 5),
        ("g1-0", 0): Credited(0.5, 0.5, 3),
    }
    kept, asked = credited(monkeypatch, reply, multiple=4)
    assert asked == [(Session.credit, 7, ["g0", "g1", "g9"])]
    assert [sample_of(e) for e in kept] == [("g0-0", 0), ("g1-0", 0), ("g1-1", 0), None]
    assert [e.advantages.tolist()[0] for e in kept] == [1.5, 0.5, -1.5, 0.0]
    assert [e.info["token_weight"] for e in kept] == [0.25, 0.5, 0.5, 0.0]
    assert [e.info[ROW] for e in kept] == [row_id(7, 0), row_id(7, 3), row_id(7, 5), row_id(7, 0)]
    assert {e.info[BATCH_SIZE] for e in kept} == {4}
    assert {tuple(e.custom_fields) for e in kept} == {tuple(kept[0].custom_fields)}, "Trinity takes one kind only"


def test_a_batch_with_nothing_to_learn_from_is_still_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, _ = credited(monkeypatch, {}, multiple=2)
    assert len(kept) == 2
    assert not any(e.action_mask.any() for e in kept)


def test_a_train_step_takes_one_batch_whatever_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = [SimpleNamespace(info={BATCH_SIZE: size}, of=size) for size in (3, 1, 2) for _ in range(size)]

    class Reader:
        async def read(self, count: int) -> list[Any]:
            return [queue.pop(0) for _ in range(count)]

    monkeypatch.setattr(experiences, "get_buffer_reader", lambda config: Reader())
    config: Any = SimpleNamespace(trainer_input=SimpleNamespace(experience_buffer=None))
    strategy = experiences.WholeBatches(config)
    taken = [[e.of for e in asyncio.run(strategy.sample(step))[0]] for step in (1, 2, 3)]
    assert taken == [[3, 3, 3], [1], [2, 2]]


# -------------------------------------------------------------------------------------------------------- the mailbox


class Remote:
    """A mailbox's actor without Ray: its methods are called with ``.remote``."""

    def __init__(self) -> None:
        self._mailbox = mailbox._Mailbox()

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self._mailbox, name))


def by_mailbox(answers: Any, *asked_for: Any) -> list[Any]:
    async def run() -> list[Any]:
        remote = Remote()
        answering = asyncio.ensure_future(mailbox.Mailbox(remote).answer_requests(answers))
        asked = [remote.ask.remote(cloudpickle.dumps(request)) for request in asked_for]
        try:
            return [cloudpickle.loads(reply) for reply in await asyncio.gather(*asked)]
        finally:
            answering.cancel()
            (ended,) = await asyncio.gather(answering, return_exceptions=True)
            if isinstance(ended, RunError):
                raise ended

    return asyncio.run(run())


def test_a_question_that_takes_long_keeps_no_other_from_its_answer() -> None:
    first_done = asyncio.Event()
    order: list[str] = []

    def answers(request: str) -> Any:
        async def late() -> str:
            await first_done.wait()
            return "late"

        order.append(request)
        if request == "slow":
            return late()
        first_done.set()
        return "soon"

    assert by_mailbox(answers, "slow", "quick") == [("late", ""), ("soon", "")]
    assert order == ["slow", "quick"]


def test_what_an_answer_raises_ends_the_run_and_is_said_to_who_asked() -> None:
    def answers(request: str) -> Any:
        raise RunError("the world is broken")

    with pytest.raises(RunError, match="the world is broken"):
        by_mailbox(answers, "anything")


def test_a_question_asked_while_nobody_answers_waits_for_the_next_who_does() -> None:
    """As when the person interrupts a run, and the trainer's step is saved."""

    async def run() -> Any:
        remote = Remote()
        ours = mailbox.Mailbox(remote)
        for _ in range(2):
            answering = asyncio.ensure_future(ours.answer_requests(lambda request: request))
            await asyncio.sleep(0.01)
            answering.cancel()
        asked = asyncio.ensure_future(remote.ask.remote(cloudpickle.dumps("trained")))
        await asyncio.sleep(0.01)
        answering = asyncio.ensure_future(ours.answer_requests(lambda request: f"{request} heard"))
        try:
            return cloudpickle.loads(await asyncio.wait_for(asked, 5))
        finally:
            answering.cancel()

    assert asyncio.run(run()) == ("trained heard", "")


# -------------------------------------------------------------------------------------------------------- the session


@pytest.fixture
def experiment(tmp_path: Path) -> Iterator[TrainingRun]:
    (tmp_path / "flow.py").write_text(
        "from astuner import Workflow\n"
        "class Flow(Workflow):\n"
        "    async def execute(self, workflow_task, model_tuner): ..."
    )
    (tmp_path / "tasks.jsonl").write_text("".join(f'{{"question": "{n}?"}}\n' for n in range(6)))
    config = fake_config(
        tmp_path,
        "  data: {train_batch_size: 2, shuffle: false}\n"
        "  rollout: {workflow: flow.py->Flow, num_repeat: 2}\n"
        "  trainer_common: {total_steps: 3, test_freq: 2, save_freq: 2}\n"
        "  task_reader:\n"
        "    type: jsonl\n"
        "    jsonl: {training: {file_path: tasks.jsonl}, validation: {file_path: tasks.jsonl}}\n",
    )
    run_dir = RunDir(tmp_path / "run")
    run_dir.start()
    run = TrainingRun(config, run_dir, read_tasks(config), sinks=[JsonlSink()])
    yield run
    run.close()


def session_of(experiment: TrainingRun, job: Path, **more: Any) -> Session:
    parts: Any = None  # what runners ask for; nobody does here
    return Session(experiment, parts, job=job, **more)


def rolled_out(session: Session, *rewards: float) -> Any:
    """Draw a step, and let all its groups come back."""
    step, draws, repeat = asyncio.run(session.next_draws())
    assert repeat == 2
    for draw in draws:
        assert session.group_over(step, group(draw, *rewards)).kept
    return session.credit(step, [d[0] for d in draws]), draws


def test_a_step_from_its_draws_to_its_row_in_the_metrics(experiment: TrainingRun, tmp_path: Path) -> None:
    session = session_of(experiment, tmp_path)
    found, draws = rolled_out(session, 0.0, 1.0)
    assert sorted(found) == sorted((f"{draw[0]}-{n}", 0) for draw in draws for n in (0, 1))
    assert {round(c.advantage, 3) for c in found.values()} <= {-0.707, 0.707, -1.0, 1.0}
    session.step_trained(1, {"actor/loss": 0.5, "time/train_step": 1.0, "actor/unknown": 3.0})
    (row,) = [r for r in experiment.run_dir.read_metrics() if r["step"] == 1]
    assert row["loss"] == 0.5
    assert row["queue/batches"] == 0
    assert row["staleness/max"] == row["policy_staleness"] == row["nothing_learnable"] == row["time/save"] == 0
    assert row["tokens/trained"] == row["tokens/trainable"] > 0
    assert row["reward/mean"] == 0.5
    assert session.trained
    assert session.is_save_due(1) is False
    assert session.is_save_due(2) is True


def test_samples_without_a_gradient_are_left_out(experiment: TrainingRun, tmp_path: Path) -> None:
    found, _ = rolled_out(session_of(experiment, tmp_path), 1.0, 1.0)
    assert found == {}


def test_a_checkpoint_has_the_books_of_its_step_though_later_ones_were_drawn(
    experiment: TrainingRun, tmp_path: Path
) -> None:
    session = session_of(experiment, tmp_path)
    rolled_out(session, 0.0, 1.0)
    rolled_out(session, 0.0, 1.0)  # ahead of the trainer
    session.step_trained(1, {})
    state = tmp_path / "global_step_1"
    state.mkdir()
    session.saved(1, 0.5)
    books = json.loads((state / "astuner.json").read_text())
    assert books["state"]["draws"] == {"position": 2, "returned": []}
    assert session.saved_step == 1
    assert not session.trained
    session.step_trained(2, {})
    assert [row["time/save"] for row in experiment.run_dir.read_metrics()] == [0, 0.5]


def test_draws_wait_for_weights_that_are_not_too_old(experiment: TrainingRun, tmp_path: Path) -> None:
    async def run() -> None:
        session = session_of(experiment, tmp_path, max_staleness=1)
        first = await session.next_draws()
        second = await session.next_draws()
        assert (first[0], second[0]) == (1, 2)
        third = asyncio.ensure_future(session.next_draws())
        await asyncio.sleep(0.05)
        assert not third.done(), "it would be trained by weights two versions younger"
        await session.weights_taken(1)
        assert (await third)[0] == 3
        assert (await session.next_draws())[1] == [], "there are three steps"

    asyncio.run(run())


def test_a_group_that_no_runner_brings_ends_the_run_unless_stragglers_are_cut(
    experiment: TrainingRun, tmp_path: Path
) -> None:
    session = session_of(experiment, tmp_path)
    step, draws, _ = asyncio.run(session.next_draws())
    session.group_over(step, group(draws[0], 0.0, 1.0))
    with pytest.raises(RunError, match="step 1: 1 of its groups did not return"):
        session.credit(step, [draws[0][0]])
    session = session_of(experiment, tmp_path, cuts_stragglers=True)
    step, draws, _ = asyncio.run(session.next_draws())
    session.group_over(step, group(draws[0], 0.0, 1.0))
    assert len(session.credit(step, [draws[0][0]])) == 2
    assert not session.group_over(step, group(draws[1], 0.0, 1.0)).kept, "too late"


def test_an_explorer_step_that_never_came_to_the_pipeline_ends_the_run(experiment: TrainingRun, tmp_path: Path) -> None:
    session = session_of(experiment, tmp_path)
    asyncio.run(session.next_draws())
    with pytest.raises(RunError, match="step 1: its groups did not return"):
        session.rolled_out(1)


def test_what_a_part_reports_ends_the_run(experiment: TrainingRun, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="taking new weights failed"):
        session_of(experiment, tmp_path).failed("taking new weights failed: OSError: gone")


def test_weights_are_validated_when_one_of_their_steps_was_due(experiment: TrainingRun, tmp_path: Path) -> None:
    session = session_of(experiment, tmp_path)
    assert session.is_validation_due(0), "before the first step"
    step, draws, repeat = session.begin_validation(0)
    assert (step, len(draws), repeat) == (0, 6, 1)
    for draw in draws[:-1]:
        session.validated(0, group(draw, 1.0))
    with pytest.raises(RunError, match="1 of 6 tasks did not return"):
        session.end_validation()
    session.validated(0, group(draws[-1], 0.0))
    session.end_validation()
    (row,) = [r for r in experiment.run_dir.read_metrics() if "val/success" in r]
    assert row["val/success"] == pytest.approx(5 / 6)
    assert not session.is_validation_due(0)
    assert not session.is_validation_due(1)
    assert session.is_validation_due(3), "2 was due, and the engines never had its weights"


# --------------------------------------------------------------------------------------------------------- continuing


def test_trinitys_folder_is_put_back_to_the_step_that_is_continued_from(tmp_path: Path) -> None:
    for step in (2, 4, 5):
        (tmp_path / f"global_step_{step}").mkdir()
    (tmp_path / "latest_state_dict_iteration.txt").write_text("5")
    (tmp_path / "explorer_meta.json").write_text('{"latest_iteration": 7}')
    launch.rewind(tmp_path, 4)
    assert [p.name for p in tmp_path.glob("global_step_*")] == ["global_step_4"]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "4"
    assert not (tmp_path / "latest_state_dict_iteration.txt").exists()
    for who in ("explorer", "trainer"):
        assert json.loads((tmp_path / f"{who}_meta.json").read_text())["latest_iteration"] == 4
    launch.rewind(tmp_path, 0)
    assert list(tmp_path.iterdir()) == []


def test_silence_is_measured_from_the_last_word(experiment: TrainingRun, tmp_path: Path) -> None:
    session = session_of(experiment, tmp_path)
    time.sleep(0.02)
    before = session.silent_for
    session.answer(Request("at", ("trainer", "trains step 1")))
    assert session.silent_for < before
    assert session.doing["trainer"][0] == "trains step 1"


def test_tensors_of_an_experience_are_what_verl_gathers() -> None:
    (experience,) = of_episode(episode(("g", None), 0, 1.0), [sample()])
    assert experience.tokens.dtype == torch.int32
    assert experience.logprobs.dtype == torch.float32
    assert experience.action_mask.dtype == torch.bool
    assert len(experience.tokens) - experience.prompt_length == len(experience.logprobs) == len(experience.action_mask)
