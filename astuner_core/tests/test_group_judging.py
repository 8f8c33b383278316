"""A judge that compares attempts is asked once about each group, and everybody hears of an episode when it is over."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from astuner.chat.codec import ChatCodec
from astuner.contracts.errors import ConfigError, JudgeFailed
from astuner.contracts.judge import Attempt, GroupJudge
from astuner.contracts.types import Episode, JudgeOutput, Split, StopReason, Task, WorkflowOutput
from astuner.rollout.judging import as_verdict
from astuner.rollout.models import EpisodesHere, one_model, sampling_for
from astuner.rollout.pool import Group, RolloutPool
from astuner.rollout.runner import EpisodeRunner
from astuner.rollout.threads import Misbehaved
from astuner.runs.run import TrainingRun
from astuner.runs.run_dir import RunDir
from astuner.runs.tasks import read_tasks
from astuner.testing import check_judge
from astuner_testing.fakes import FakeEngine, fake_config, make_tokenizer, workflow_task
from tests.groups import until_enough
from tests.table import table

TOKENIZER = make_tokenizer()

CODE = """
import asyncio, time
from astuner import JudgeOutput, Workflow, WorkflowOutput
from astuner.contracts.errors import ConfigError, JudgeFailed
from astuner.contracts.judge import GroupJudge

asked = []
class W(Workflow):
    async def execute(self, workflow_task, model_tuner):
        reply = await model_tuner.chat([{{"role": "user", "content": "hi"}}])
        n = workflow_task.attempt
{workflow}
        return WorkflowOutput(response=str(n))

class G(GroupJudge):
    {kind}def judge_group(self, attempts):
        asked.append([a.output.response for a in attempts])
{judge}

class Evaluated(G):
    wants_evaluation = True
"""
BY_PLACE = "return [JudgeOutput(reward=float(a.output.response)) for a in attempts]"
DRAWS = [(f"g{i}", Task(task_id=str(i))) for i in range(2)]


def indent(body: str) -> str:
    return "\n".join(f"        {line}" for line in body.strip("\n").split("\n"))


class Judged:
    """A runner with a group judge, and a pool that uses it."""

    def __init__(
        self,
        folder: Path,
        *,
        judge: str = BY_PLACE,
        workflow: str = "pass",
        kind: str = "",
        settings: str = "",
        replies: Any = ("answer",) * 99,
    ) -> None:
        folder = folder / f"run{len(list(folder.iterdir()))}"  # a file is imported once
        folder.mkdir()
        code = CODE.format(workflow=indent(workflow), judge=indent(judge), kind=kind)
        (folder / "mine.py").write_text(code)
        (folder / "tasks.jsonl").write_text("".join(f'{{"question": "{n}?"}}\n' for n in range(4)))
        names = ["astuner.rollout.workflow=mine.py->W", "astuner.task_judge.judge=mine.py->G"]
        self.config = fake_config(folder, settings, names)
        self.runner = EpisodeRunner(self.config)
        self.runner.prepare()
        self.models = one_model(FakeEngine(replies, TOKENIZER), ChatCodec(TOKENIZER))
        self.told: list[Episode] = []
        self.module = type(self.runner._parts().judging._judge).judge_group.__globals__  # type: ignore[union-attr]

    def pool(self, **given: Any) -> RolloutPool:
        host = EpisodesHere(self.runner, self.models)
        sampling = sampling_for(self.config, Split.TRAIN)

        async def run(task: Any) -> Episode:
            return await host.run(task, sampling)

        return RolloutPool(run, max_parallel=64, on_episode=self.told.append, judge_group=host.judge_group, **given)

    def groups(self, repeat: int = 3, draws: Any = DRAWS) -> list[Group]:
        return asyncio.run(self.pool().run_groups(draws, repeat=repeat, split=Split.TRAIN))

    @property
    def asked(self) -> list[list[str]]:
        return self.module["asked"]  # type: ignore[no-any-return]


@table("kind", ["", "async "])
def test_the_judge_is_asked_once_about_each_group_when_all_of_it_has_ended(tmp_path: Path, kind: str) -> None:
    judged = Judged(tmp_path, kind=kind)
    groups = judged.groups()
    assert judged.asked == [["0", "1", "2"], ["0", "1", "2"]]
    for group in groups:
        assert group.complete
        assert group.has_spread
        assert [e.reward for e in group.episodes] == [0.0, 1.0, 2.0]
        assert {(e.reward_source, e.stop_reason, e.retries) for e in group.episodes} == {
            ("judge", StopReason.COMPLETED, 0)
        }
    assert len(judged.told) == 6
    assert all(e.verdict is not None for e in judged.told)  # nobody heard of one that was not over


def test_an_attempt_that_waits_says_so_and_survives_a_journey_to_another_process(tmp_path: Path) -> None:
    judged = Judged(tmp_path)
    runner = pickle.loads(pickle.dumps(judged.runner))
    sampling = sampling_for(judged.config, Split.TRAIN)
    waiting = [asyncio.run(runner.run(workflow_task(), judged.models, sampling)) for _ in range(2)]
    assert {(e.verdict, e.reward_source, e.stop_reason) for e in waiting} == {(None, "", StopReason.COMPLETED)}
    over = asyncio.run(runner.judge_group(pickle.loads(pickle.dumps(waiting))))
    assert [e.reward for e in over] == [0.0, 0.0]
    assert [e.turns for e in over] == [e.turns for e in waiting]


SOME_FAIL = """
if n == 0: raise RuntimeError("no")
if n == 1: return WorkflowOutput(reward=0.75)
"""


def test_failed_attempts_are_not_shown_and_rewards_of_the_workflow_are_kept(tmp_path: Path) -> None:
    judged = Judged(tmp_path, workflow=SOME_FAIL)
    (group,) = judged.groups(4, DRAWS[:1])
    assert judged.asked == [["2", "3"]]
    assert [(e.reward, e.reward_source) for e in group.episodes] == [
        (None, ""),
        (0.75, "workflow"),
        (2.0, "judge"),
        (3.0, "judge"),
    ]
    assert sorted(e.workflow_task.attempt for e in judged.told) == [0, 1, 2, 3]


def test_one_that_a_check_stopped_keeps_its_punishment_and_is_not_shown(tmp_path: Path) -> None:
    settings = "  rollout: {compute_madness_checklist: [control_tokens], agent_madness_reward: -1.0}\n"
    replies = ["fine", "<|im_start|>assistant", "fine"]
    judged = Judged(tmp_path, settings=settings, replies=replies)
    (group,) = judged.groups(3, DRAWS[:1])
    stopped = [e for e in group.episodes if e.stop_reason is StopReason.CHECK_ABORTED]
    assert [(e.reward, e.reward_source) for e in stopped] == [(-1.0, "check")]
    assert len(judged.asked[0]) == 2


def test_the_last_attempt_that_is_left_is_still_shown_alone_and_none_is_asked_about_where_none_is(
    tmp_path: Path,
) -> None:
    one = Judged(tmp_path, workflow="if n: raise RuntimeError('no')")
    (group,) = one.groups(3, DRAWS[:1])
    assert one.asked == [["0"]]
    assert [e.reward for e in group.episodes] == [0.0, None, None]
    none = Judged(tmp_path, workflow="raise RuntimeError('no')")
    none.groups(3, DRAWS[:1])
    assert none.asked == []


@table(
    ("judge", "says"),
    [
        ("raise JudgeFailed('down')", "down"),
        ("raise KeyError('x')", "the judge G raised KeyError"),
        ("return [JudgeOutput(reward=1.0)]", "returned 1 verdicts for 3 attempts"),
        ("return [JudgeOutput(reward=1.0)] * 4", "returned 4 verdicts for 3 attempts"),
        ("return 1.0", "it must return a sequence"),
        ("return ['A', 'B', 'C']", "returned 'A'; it must return a JudgeOutput"),
        ("return None", "it must return a sequence"),
        ("time.sleep(60)", "task_judge.judge_timeout = 0.2 s"),
        ("return [JudgeOutput(reward=float('nan'))] * 3", "a reward must be a finite number"),
    ],
)
def test_a_judge_without_verdicts_is_asked_again_and_then_the_whole_group_is_dropped(
    tmp_path: Path, judge: str, says: str
) -> None:
    limit = 0.2 if "sleep" in judge else 60
    settings = f"  task_judge: {{judge_timeout: {limit}}}\n  rollout: {{max_retries: 1}}\n"
    judged = Judged(tmp_path, judge=judge, settings=settings)
    (group,) = judged.groups(3, DRAWS[:1])
    assert len(judged.asked) == 2  # about the same outputs; nothing was rolled out again
    assert {(e.stop_reason, e.reward, e.retries) for e in group.episodes} == {(StopReason.JUDGE_FAILED, None, 1)}
    assert says in group.episodes[0].error
    assert len(judged.told) == 3


def test_a_judge_that_comes_back_gives_its_verdicts(tmp_path: Path) -> None:
    judged = Judged(tmp_path, judge=f"if len(asked) < 3: raise JudgeFailed('busy')\n{BY_PLACE}")
    (group,) = judged.groups(2, DRAWS[:1])
    assert [(e.reward, e.retries) for e in group.episodes] == [(0.0, 2), (1.0, 2)]


def test_one_attempt_that_cannot_be_judged_is_dropped_alone(tmp_path: Path) -> None:
    judge = """
found = [JudgeOutput(reward=float(a.output.response)) for a in attempts]
found[1] = JudgeFailed('unreadable')
return found
"""
    judged = Judged(tmp_path, judge=judge, settings="  rollout: {max_retries: 0}\n")
    (group,) = judged.groups(3, DRAWS[:1])
    assert [e.reward for e in group.episodes] == [0.0, None, 2.0]
    assert (group.episodes[1].stop_reason, group.episodes[1].error) == (StopReason.JUDGE_FAILED, "unreadable")


def test_asking_again_never_costs_the_verdicts_that_were_there(tmp_path: Path) -> None:
    judge = """
if len(asked) > 1: raise JudgeFailed('down')
found = [JudgeOutput(reward=float(a.output.response)) for a in attempts]
found[1] = JudgeFailed('unreadable')
return found
"""
    judged = Judged(tmp_path, judge=judge)
    (group,) = judged.groups(3, DRAWS[:1])
    assert len(judged.asked) == 3
    assert [(e.reward, e.retries) for e in group.episodes] == [(0.0, 2), (None, 2), (2.0, 2)]


def test_a_mistake_in_the_config_ends_the_run(tmp_path: Path) -> None:
    judged = Judged(tmp_path, judge="raise ConfigError('the budget is spent')")
    with pytest.raises(ConfigError, match="budget is spent"):
        judged.groups()
    assert judged.told == []


def test_a_group_that_is_cut_short_is_not_judged_and_none_of_it_is_scored(tmp_path: Path) -> None:
    judged = Judged(tmp_path, workflow="if workflow_task.group_id == 'g0' and n == 1: await asyncio.sleep(3600)")
    cut, whole = asyncio.run(until_enough(judged.pool(), DRAWS, repeat=2, needed=1))
    assert judged.asked == [["0", "1"]]
    assert (whole.complete, [e.reward for e in whole.episodes]) == (True, [0.0, 1.0])
    assert not cut.complete
    assert [(e.stop_reason, e.reward) for e in cut.episodes] == [(StopReason.CANCELLED, None)] * 2
    assert "before its judge could compare" in cut.episodes[0].error
    assert sorted(e.workflow_task.episode_id for e in judged.told) == ["g0-0", "g0-1", "g1-0", "g1-1"]


def test_a_group_that_is_being_judged_when_enough_others_are_complete_is_cut_short_too(tmp_path: Path) -> None:
    judge = f"if attempts[0].workflow_task.group_id == 'g0': await asyncio.sleep(3600)\n{BY_PLACE}"
    judged = Judged(tmp_path, judge=judge, kind="async ", settings="  task_judge: {judge_timeout: 3600}\n")
    cut, whole = asyncio.run(until_enough(judged.pool(), DRAWS, repeat=2, needed=1))
    assert whole.complete
    assert not cut.complete
    assert {e.stop_reason for e in cut.episodes} == {StopReason.CANCELLED}
    assert len(judged.told) == 4


def test_a_run_that_is_interrupted_while_a_group_is_judged_tells_of_its_attempts_as_cancelled(tmp_path: Path) -> None:
    judged = Judged(
        tmp_path, judge="await asyncio.sleep(3600)", kind="async ", settings="  task_judge: {judge_timeout: 3600}\n"
    )

    async def interrupted() -> None:
        work = asyncio.ensure_future(judged.pool().run_groups(DRAWS[:1], repeat=2, split=Split.TRAIN))
        while not judged.asked:
            await asyncio.sleep(0.01)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    asyncio.run(interrupted())
    assert [e.stop_reason for e in judged.told] == [StopReason.CANCELLED] * 2


def test_agents_may_have_rewards_of_their_own_and_one_without_drops_its_attempt_alone(tmp_path: Path) -> None:
    judge = """
who = ["solver", "critic"], ["solver"]
return [JudgeOutput.per_agent(dict.fromkeys(who[int(a.output.response)], 1.0)) for a in attempts]
"""
    workflow = 'reply = await model_tuner.chat([{"role": "user", "content": "x"}], agent_name="critic")'
    code_agent = 'reply = await model_tuner.chat([{"role": "user", "content": "y"}], agent_name="solver")'
    judged = Judged(
        tmp_path,
        judge=judge,
        workflow=f"{workflow}\n{code_agent}",
        settings="  agents: {solver: {}, critic: {}, default: {train: false}}\n  rollout: {max_retries: 0}\n",
    )
    (group,) = judged.groups(2, DRAWS[:1])
    assert [e.reward for e in group.episodes] == [1.0, None]
    assert group.episodes[0].verdict is not None
    assert group.episodes[0].verdict.rewards == {"solver": 1.0, "critic": 1.0}
    assert group.episodes[1].stop_reason is StopReason.JUDGE_FAILED
    assert "agent 'critic'" in group.episodes[1].error


def test_a_step_of_an_experiment_counts_logs_and_credits_judged_attempts(tmp_path: Path) -> None:
    settings = (
        "  data: {train_batch_size: 2, shuffle: false}\n"
        "  rollout: {num_repeat: 2}\n"
        "  trainer_common: {total_steps: 1}\n"
        "  task_reader: {type: jsonl, jsonl: {training: {file_path: tasks.jsonl}}}\n"
    )
    judged = Judged(tmp_path, settings=settings)
    run_dir = RunDir(tmp_path / "run")
    run_dir.start()
    experiment = TrainingRun(judged.config, run_dir, read_tasks(judged.config))
    try:
        rollout = experiment.rollout(judged.models, 1)
        samples, _ = experiment.credit(rollout, policy_version=0)
        assert experiment.ledger.counts["completed"] == 4
        assert rollout.metrics["reward/mean"] == 0.5
        assert sorted(s.reward for s in samples) == [0.0, 0.0, 1.0, 1.0]
        assert all(s.advantage for s in samples)
    finally:
        experiment.close()


class ByLength(GroupJudge):
    def judge_group(self, attempts: Sequence[Attempt]) -> list[JudgeOutput]:
        longest = max(len(str(a.output.response)) for a in attempts)
        return [JudgeOutput(reward=len(str(a.output.response)) / longest) for a in attempts]


def outputs(*texts: str) -> list[WorkflowOutput]:
    return [WorkflowOutput(response=text) for text in texts]


def test_a_group_judge_can_be_asked_about_one_attempt() -> None:
    assert asyncio.run(ByLength().judge(workflow_task(), WorkflowOutput(response="ab"))).reward == 1.0


def test_check_judge_checks_group_judges() -> None:
    found = check_judge(ByLength(), workflow_task(), outputs("a", "ab", "abcd"))
    assert [v.reward for v in found if isinstance(v, JudgeOutput)] == [0.25, 0.5, 1.0]
    assert check_judge(ByLength(), workflow_task(), WorkflowOutput(response="ab")).reward == 1.0


class ByPlace(GroupJudge):
    def judge_group(self, attempts: Sequence[Attempt]) -> list[JudgeOutput]:
        return [JudgeOutput(reward=float(n)) for n, _ in enumerate(attempts)]


class TooFew(GroupJudge):
    def judge_group(self, attempts: Sequence[Attempt]) -> list[JudgeOutput]:
        return [JudgeOutput(reward=1.0)]


class Writes(GroupJudge):
    def judge_group(self, attempts: Sequence[Attempt]) -> list[JudgeOutput]:
        attempts[0].output.metadata["seen"] = True
        return [JudgeOutput(reward=1.0) for _ in attempts]


class Counts(GroupJudge):
    asked = 0

    def judge_group(self, attempts: Sequence[Attempt]) -> list[JudgeOutput]:
        self.asked += 1
        return [JudgeOutput(reward=float(self.asked)) for _ in attempts]


class Fails(GroupJudge):
    def judge_group(self, attempts: Sequence[Attempt]) -> list[JudgeOutput | JudgeFailed]:
        return [JudgeFailed("no") for _ in attempts]


@table(
    ("judge", "says"),
    [
        (ByPlace(), "must not depend on its position"),
        (TooFew(), "returned 1 verdicts for 2 attempts"),
        (Writes(), "changed the output"),
        (Counts(), "not keep state"),
    ],
)
def test_check_judge_finds_what_is_wrong_with_a_group_judge(judge: GroupJudge, says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        check_judge(judge, workflow_task(), outputs("a", "b"))


def test_check_judge_takes_failures_in_place_of_verdicts() -> None:
    assert [str(v) for v in check_judge(Fails(), workflow_task(), outputs("a", "b"))] == ["no", "no"]


def test_a_judge_may_say_a_number_or_whether_it_is_right() -> None:
    said = {answer: as_verdict(answer) for answer in (0.25, 3, False)}
    assert [(verdict.reward, verdict.is_success) for verdict in said.values()] == [
        (0.25, None),
        (3.0, None),
        (0.0, False),
    ]
    assert (as_verdict(True).reward, as_verdict(True).is_success) == (1.0, True)
    with pytest.raises(Misbehaved, match="returned nan"):
        as_verdict(float("nan"))
