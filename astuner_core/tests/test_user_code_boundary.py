"""Whatever a workflow, a judge, an environment or a check raises or returns ends its own episode, and says what it was.

Every kind of user code meets every hostile thing, in a real `EpisodeRunner`, as in a run: an `Interrupt` listens.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from astuner.chat.codec import ChatCodec
from astuner.contracts.environment import Evaluation
from astuner.contracts.errors import LONGEST_TEXT, ConfigError, PluginError, safe_text, told
from astuner.contracts.interrupt import Interrupt, StoppedAtOnce
from astuner.contracts.objective import Compared
from astuner.contracts.types import Episode, JudgeOutput, SamplingParams, Split, StopReason, Task, WorkflowTask
from astuner.rollout.credit import estimate_advantages
from astuner.rollout.models import one_model
from astuner.rollout.pool import RolloutPool
from astuner.rollout.runner import EpisodeRunner
from astuner.testing import FakeEngine, fake_config, make_tokenizer
from tests.table import table

TOKENIZER = make_tokenizer()
SAMPLING = SamplingParams(max_tokens=50)
CODE = """
import asyncio, os, sys
from astuner import Environment, Judge, JudgeOutput, Workflow, WorkflowOutput
from astuner.contracts.judge import GroupJudge
from astuner.contracts.environment import Evaluation, StepResult
from astuner.contracts.errors import EnvironmentFailed, JudgeFailed

class Mute(Exception):
    def __str__(self):
        raise KeyboardInterrupt
    __repr__ = __str__

class MuteOfOurs(JudgeFailed, EnvironmentFailed):
    __str__ = __repr__ = Mute.__str__

class Shy:
    reward = property(lambda self: sys.exit(3))
    __repr__ = Mute.__str__

class Odd(float):
    def __float__(self):
        return float("nan")

def bad(place):
    if place == "{place}":
        {bad}

async def speak(tuner):
    return await tuner.chat([{{"role": "user", "content": "hi"}}])

class Async(Workflow):
    async def execute(self, workflow_task, model_tuner):
        await speak(model_tuner)
        return bad("workflow") or WorkflowOutput()

class Plain(Workflow):
    def execute(self, workflow_task, model_tuner):
        model_tuner.chat_sync([{{"role": "user", "content": "hi"}}])
        return bad("workflow") or WorkflowOutput()

class Acts(Workflow):
    async def execute(self, workflow_task, model_tuner):
        await speak(model_tuner)
        model_tuner.gym_step({{"role": "assistant", "content": "go"}})
        return bad("workflow") or WorkflowOutput()

class AsyncJudge(Judge):
    wants_evaluation = True
    async def judge(self, workflow_task, output):
        await asyncio.sleep(0)
        return bad("judge") or JudgeOutput(reward=1.0)

class PlainJudge(Judge):
    def judge(self, workflow_task, output):
        return bad("judge") or JudgeOutput(reward=1.0)

class Together(GroupJudge):
    async def judge_group(self, attempts):
        return bad("judge") or [JudgeOutput(reward=1.0) for _ in attempts]

class World(Environment):
    @classmethod
    def tasks(cls, split, params):
        return iter(())
    def reset(self, task):
        return bad("reset") or StepResult(observation="go")
    def step(self, action):
        return bad("step") or StepResult(observation="done", terminated=True)
    def evaluate(self):
        return bad("evaluate") or 1.0
    def close(self):
        bad("close")

def check(view):
    return bad("check")
"""


def play(
    folder: Path, place: str, bad: str, *, workflow: str = "Async", judge: str = "AsyncJudge", env_type: str = ""
) -> tuple[Episode, Episode]:
    """The episode in which ``place`` does ``bad``; and one beside it, in the same group."""
    (folder / "mine.py").write_text(CODE.format(place=place, bad=bad))
    overrides = [f"astuner.rollout.workflow=mine.py->{workflow}", f"astuner.task_judge.judge=mine.py->{judge}"]
    text = "  rollout: {max_retries: 0, compute_madness_checklist: ['mine.py->check']}\n"
    runner = EpisodeRunner(fake_config(folder, text, overrides))
    task = Task(task_id="t", main_query="hi", env_type=env_type)
    models = one_model(FakeEngine(["a"] * 9, TOKENIZER), ChatCodec(TOKENIZER))

    async def both() -> tuple[Episode, Episode]:
        pool = RolloutPool(
            lambda one: runner.run(one, models, SAMPLING),
            max_parallel=2,
            judge_group=runner.judge_group if judge == "Together" else None,
        )
        group = await pool.run_group(("g", task), repeat=2, split=Split.TRAIN)
        first, second = group.episodes
        return first, second

    with Interrupt().listening():
        return asyncio.run(both())


PLACES = [
    ("workflow", StopReason.WORKFLOW_FAILED, {"workflow": "Async"}),
    ("workflow", StopReason.WORKFLOW_FAILED, {"workflow": "Plain"}),
    ("workflow", StopReason.WORKFLOW_FAILED, {"workflow": "Acts", "env_type": "mine.py->World"}),
    ("judge", StopReason.JUDGE_FAILED, {"judge": "AsyncJudge"}),
    ("judge", StopReason.JUDGE_FAILED, {"judge": "PlainJudge"}),
    ("judge", StopReason.JUDGE_FAILED, {"judge": "Together"}),
    ("check", StopReason.JUDGE_FAILED, {}),
    *(
        (place, StopReason.ENVIRONMENT_FAILED, {"workflow": "Acts", "env_type": "mine.py->World"})
        for place in ("reset", "step", "evaluate")
    ),
]
RAISES = [
    ("raise ValueError('mine')", "ValueError: mine"),
    ("raise Mute", "Mute: <Mute, whose text cannot be made: KeyboardInterrupt>"),
    ("raise MuteOfOurs", "<MuteOfOurs, whose text cannot be made: KeyboardInterrupt>"),
    ("raise ValueError('x' * 10**6)", "xxx… (1,000,000 characters)"),
    ("raise ValueError(10**5000)", "whose text cannot be made: ValueError"),
    ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    ("raise GeneratorExit", "GeneratorExit"),
    ("sys.exit(Shy())", ""),
    ("raise asyncio.CancelledError", ""),
    ("class Panic(BaseException): pass\n        raise Panic('rust')", "Panic: rust"),
    ("raise BaseExceptionGroup('g', [SystemExit(1)])" if sys.version_info >= (3, 11) else "raise SystemExit", ""),
    ("os._exit(0)", "Exited: os._exit(0) would end the run"),
    ("return Shy()", ""),
]


@table(
    "place, reason, how, bad, says",
    [(place, reason, how, bad, says) for place, reason, how in PLACES for bad, says in RAISES],
)
def test_it_ends_its_episode_and_is_told(
    tmp_path: Path, place: str, reason: StopReason, how: dict[str, str], bad: str, says: str
) -> None:
    for episode in play(tmp_path, place, bad, **how):
        if bad != "raise MuteOfOurs":  # which says itself what it is
            if place == "check" and "Cancelled" in bad:  # a workflow that is cancelled from within
                reason = StopReason.WORKFLOW_FAILED
            assert episode.stop_reason is reason, episode
        assert (episode.verdict, episode.output is None or place in ("judge", "evaluate")) == (None, True)
        assert says in episode.error
        assert episode.error
        assert len(episode.error) < LONGEST_TEXT + 2000


@table("bad", [bad for bad, _ in RAISES if bad.startswith("raise")])
def test_an_environment_that_cannot_be_closed_costs_nothing(tmp_path: Path, bad: str) -> None:
    for episode in play(tmp_path, "close", bad, workflow="Acts", env_type="mine.py->World"):
        assert (episode.stop_reason, episode.reward) == (StopReason.COMPLETED, 1.0)
        assert episode.error


REWARD = "a finite number from -1e9 to 1e9"
SUCCESS = "must be True, False or None"
WORKFLOW, JUDGE, GROUP, WORLD = PLACES[0], PLACES[3], PLACES[5], PLACES[9]
STEP = PLACES[8]
VERDICTS = [
    *((WORKFLOW, f"return WorkflowOutput(reward={v})", REWARD) for v in ("'1.0'", "1j", "1e308", "10**5000")),
    (WORKFLOW, "return WorkflowOutput(reward=Odd(1.0))", REWARD),
    (WORKFLOW, "return WorkflowOutput(reward={'default': Odd(1.0)})", REWARD),
    (WORKFLOW, "return 1e308", REWARD),
    (WORKFLOW, "return WorkflowOutput(reward=1.0, is_success='no')", f"is_success {SUCCESS}, not 'no'"),
    (WORKFLOW, "return WorkflowOutput(is_success=1)", f"is_success {SUCCESS}, not 1"),
    (WORKFLOW, "return WorkflowOutput(evaluation='good')", "it must be an Evaluation or None"),
    (WORKFLOW, "return WorkflowOutput(reward={'nobody': 1.0})", "agent 'default'"),
    (WORKFLOW, "return WorkflowOutput(reward=1.0, metrics={'x': Odd(1.0)})", "must be a finite number"),
    (JUDGE, "return JudgeOutput(reward=1.0, is_success='no')", f"is_success {SUCCESS}, not 'no'"),
    (JUDGE, "return JudgeOutput(reward=1e308)", "a reward must be a finite number from -1e9 to 1e9"),
    (JUDGE, "return JudgeOutput(reward=10**5000)", "a reward must be a finite number from -1e9 to 1e9"),
    (JUDGE, "return JudgeOutput(reward=Odd(1.0))", REWARD),
    (JUDGE, "return JudgeOutput(reward=1.0, rewards={1: 1.0})", "an agent's name and a finite number"),
    (JUDGE, "return 1.0, 'no'", f"is_success {SUCCESS}, not 'no'"),
    (JUDGE, "return 1e308, True", REWARD),
    (JUDGE, "return '1.0', True", REWARD),
    (GROUP, "return [(1.0, 'no'), (1.0, 'no')]", f"is_success {SUCCESS}, not 'no'"),
    (WORLD, "return '1.0'", "the score must be a finite number, not '1.0'"),
    (WORLD, "return 1j", "the score must be a finite number, not 1j"),
    (WORLD, "return Evaluation(score='1.0')", "the score must be a finite number, not '1.0'"),
    (WORLD, "return Evaluation(score=1.0, success='no')", f"success {SUCCESS}, not 'no'"),
    (STEP, "return StepResult(observation='', reward='1.0')", REWARD),
    (STEP, "return StepResult(observation='', reward=1e308)", REWARD),
    (STEP, "return StepResult(observation='', info=5)", "raised in step: TypeError"),
    (PLACES[7], "return StepResult(observation='', messages=5)", "raised in reset: TypeError"),
    (PLACES[7], "return StepResult(observation='', messages=('hi',))", "raised in reset: AttributeError"),
]


@table("of, bad, says", VERDICTS)
def test_a_verdict_is_of_the_right_type_on_every_road(
    tmp_path: Path, of: tuple[str, StopReason, dict[str, str]], bad: str, says: str
) -> None:
    place, reason, how = of
    for episode in play(tmp_path, place, bad, **how):
        assert (episode.stop_reason, episode.reward) == (reason, None)
        assert says in episode.error


def test_rewards_for_nobody_are_no_reward_where_no_model_was_asked(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from astuner import WorkflowOutput\n"
        "async def nobody(task, model):\n    return {'nobody': 1.0}\n"
        "async def default(task, model):\n    return {'default': 1.0, 'nobody': 0.0}\n"
    )
    task = WorkflowTask(task=Task(task_id="t"), episode_id="e", group_id="g")
    models = one_model(FakeEngine([], TOKENIZER), ChatCodec(TOKENIZER))
    found = {}
    for name in ("nobody", "default"):
        config = fake_config(tmp_path, "", [f"astuner.rollout.workflow=mine.py->{name}"])
        found[name] = asyncio.run(EpisodeRunner(config).run(task, models, SAMPLING))
    assert (found["nobody"].stop_reason, found["nobody"].reward) == (StopReason.WORKFLOW_FAILED, None)
    assert "returned rewards for nobody; the episode only has default" in found["nobody"].error
    assert (found["default"].stop_reason, found["default"].reward) == (StopReason.COMPLETED, 1.0)


def test_the_persons_own_ctrl_c_still_ends_it_at_once(tmp_path: Path) -> None:
    """The first asks to stop; the second, by a real signal in the middle of user code, is nobody's failure."""
    with pytest.raises(StoppedAtOnce):
        play(tmp_path, "workflow", "[__import__('signal').raise_signal(2) for _ in range(2)]")


def test_where_nobody_listens_ctrl_c_is_the_persons_too(tmp_path: Path) -> None:
    def pressed() -> str:
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(60)
        return ""

    with pytest.raises(KeyboardInterrupt):
        safe_text(object(), lambda _: pressed())


def test_an_advantage_estimator_may_raise_anything() -> None:
    def stops(compared: Compared) -> list[float]:
        raise SystemExit("enough")

    with pytest.raises(PluginError, match=r"the advantage estimator 'mine' raised SystemExit: enough \("):
        estimate_advantages("mine", stops, Compared(rewards=(1.0,), groups=("g",)))


def test_the_largest_rewards_are_taken_and_what_is_said_is_short() -> None:
    assert JudgeOutput(reward=-1e9).reward == -1e9
    assert Evaluation.of(3).score == 3
    assert told(ValueError("short")) == "ValueError: short"
    assert safe_text("x" * 30_000).endswith("x… (30,000 characters)")


@table("key", ["agent_madness_reward", "truncated_reward"])
def test_a_reward_of_the_experiments_file_is_in_the_same_range(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        fake_config(tmp_path, "", [f"astuner.rollout.{key}=1e300"])
    fake_config(tmp_path, "", [f"astuner.rollout.{key}=-1e9"])
