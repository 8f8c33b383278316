"""Whatever user code and infrastructure do, an episode comes out, and only honest ones carry a reward."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from astuner.backbone import InferenceEngine
from astuner.chat.codec import ChatCodec
from astuner.errors import ConfigError, ModelFailed, PluginError
from astuner.rollout.runner import EpisodeRunner
from astuner.testing.fakes import FakeEngine, fake_config, make_tokenizer, workflow_task
from astuner.types import Episode, Generation, SamplingParams, StopReason

TOKENIZER = make_tokenizer()
SAMPLING = SamplingParams(max_tokens=200)

USER_CODE = """
import asyncio, time
from astuner import Judge, JudgeOutput, Workflow, WorkflowOutput
from astuner.errors import EnvironmentFailed, JudgeFailed

async def ask(tuner, text="hi"):
    return await tuner.chat([{{"role": "user", "content": text}}])

class W(Workflow):
    async def execute(self, workflow_task, model_tuner):
{body}

class Sync(Workflow):
    def execute(self, workflow_task, model_tuner):
        reply = model_tuner.chat_sync([{{"role": "user", "content": "hi"}}])
        return WorkflowOutput(reward=1.0, response=reply.text)

async def function(task, model):
    return float((await ask(model)).text == "answer")

class J(Judge):
    def __init__(self, config=None):
        self.asked = 0
    def judge(self, workflow_task, output):
{judge}

class OldJudge:
    def __init__(self, config):
        self.temperature = config.astuner.rollout.temperature
    def compute_reward(self, workflow_task, workflow_output):
        return 2.0, False
"""


def run(
    tmp_path: Path,
    body: str,
    *,
    judge: str = "return JudgeOutput(reward=0.5)",
    settings: str = "",
    replies: Any = ("answer",) * 50,
    engine: InferenceEngine | None = None,
    workflow: str = "W",
    with_judge: str | None = "J",
) -> Episode:
    runner = make_runner(tmp_path, body, judge=judge, settings=settings, workflow=workflow, with_judge=with_judge)
    engine = engine or FakeEngine(replies, TOKENIZER)
    return asyncio.run(runner.run(workflow_task(), engine, ChatCodec(TOKENIZER), SAMPLING))


def make_runner(
    tmp_path: Path,
    body: str,
    *,
    judge: str = "pass",
    settings: str = "",
    workflow: str = "W",
    with_judge: str | None = "J",
) -> EpisodeRunner:
    code = USER_CODE.format(body=indent(body), judge=indent(judge))
    (tmp_path / "mine.py").write_text(code)
    overrides = [f"astuner.rollout.workflow=mine.py->{workflow}"]
    if with_judge:
        overrides.append(f"astuner.task_judge.judge=mine.py->{with_judge}")
    return EpisodeRunner(fake_config(tmp_path, settings, overrides))


def indent(body: str) -> str:
    return "\n".join(f"        {line}" for line in body.strip("\n").split("\n"))


SPEAK = "reply = await ask(model_tuner)\n"


def test_a_reward_of_the_workflow_is_taken_and_the_judge_not_asked(tmp_path: Path) -> None:
    episode = run(tmp_path, SPEAK + "return WorkflowOutput(reward=0.25)", judge="raise RuntimeError('asked')")
    assert (episode.stop_reason, episode.reward, episode.reward_source) == (StopReason.COMPLETED, 0.25, "workflow")
    assert len(episode.turns) == 1
    assert episode.turns[0].message["content"] == "answer"


def test_without_a_reward_the_judge_is_asked(tmp_path: Path) -> None:
    episode = run(tmp_path, SPEAK + "return WorkflowOutput()", judge="return JudgeOutput(reward=1, metrics={'x': 2.0})")
    assert (episode.reward, episode.reward_source, episode.is_success) == (1, "judge", True)


def test_a_judge_may_be_async_and_the_seeds_judge_gets_the_config_and_returns_a_tuple(tmp_path: Path) -> None:
    episode = run(tmp_path, SPEAK + "return WorkflowOutput()", with_judge="OldJudge")
    assert (episode.reward, episode.is_success) == (2.0, False)


def test_a_plain_function_workflow_runs_in_a_thread_and_a_function_of_two_is_a_workflow(tmp_path: Path) -> None:
    episode = run(tmp_path, "pass", workflow="Sync")
    assert episode.output is not None, episode.error
    assert episode.output.response == "answer"
    assert run(tmp_path, "pass", workflow="function").reward == 1.0


@pytest.mark.parametrize(
    ("body", "reason", "says"),
    [
        ("raise ValueError('my bug')", StopReason.WORKFLOW_FAILED, "ValueError: my bug"),
        ("return None", StopReason.WORKFLOW_FAILED, "must return a WorkflowOutput"),
        ("return WorkflowOutput(reward=float('nan'))", StopReason.WORKFLOW_FAILED, "finite number"),
        ("return WorkflowOutput(reward=[1.0])", StopReason.WORKFLOW_FAILED, "finite number"),
        ("raise SystemExit(3)", StopReason.WORKFLOW_FAILED, "sys.exit"),
        ("asyncio.current_task().cancel(); await asyncio.sleep(0)", StopReason.WORKFLOW_FAILED, "cancelled itself"),
        ("raise EnvironmentFailed('the world ended')", StopReason.ENVIRONMENT_FAILED, "the world ended"),
    ],
)
def test_a_workflow_that_fails_is_a_counted_episode_without_a_reward(
    tmp_path: Path, body: str, reason: StopReason, says: str
) -> None:
    episode = run(tmp_path, body)
    assert episode.stop_reason is reason
    assert episode.reward is None
    assert says in episode.error


@pytest.mark.parametrize(
    ("judge", "says"),
    [
        ("raise KeyError('answer')", "raised KeyError"),
        ("return JudgeOutput(reward=float('inf'))", "finite number"),
        ("return None", "must return a JudgeOutput"),
        ("return (None, False)", "finite number"),
        ("time.sleep(60)", "judge_timeout"),
    ],
)
def test_a_judge_that_fails_or_hangs_gives_no_reward_and_is_retried(tmp_path: Path, judge: str, says: str) -> None:
    settings = "task_judge: {judge_timeout: 0.2}\nrollout: {max_retries: 1}"
    episode = run(tmp_path, SPEAK + "return WorkflowOutput()", judge=judge, settings=_yaml(settings))
    assert (episode.stop_reason, episode.reward, episode.retries) == (StopReason.JUDGE_FAILED, None, 1)
    assert says in episode.error


def test_no_reward_and_no_judge_is_an_error_not_a_zero(tmp_path: Path) -> None:
    episode = run(tmp_path, SPEAK + "return WorkflowOutput()", with_judge=None)
    assert episode.reward is None
    assert "no judge is configured" in episode.error


@pytest.mark.parametrize(
    "body",
    [
        "await asyncio.sleep(60)",
        "try:\n    await asyncio.sleep(60)\nexcept asyncio.CancelledError:\n    return WorkflowOutput(reward=1.0)",
    ],
)
def test_a_workflow_that_never_ends_times_out_even_if_it_swallows_the_cancellation(tmp_path: Path, body: str) -> None:
    episode = run(tmp_path, body, settings=_yaml("rollout: {episode_timeout: 0.1}"))
    assert (episode.stop_reason, episode.reward) == (StopReason.TIMED_OUT, None)


def test_the_turns_before_a_failure_are_kept(tmp_path: Path) -> None:
    assert len(run(tmp_path, SPEAK + "raise ValueError('later')").turns) == 1


class Flaky(FakeEngine):
    """Fails the first calls."""

    def __init__(self, failures: int) -> None:
        super().__init__(lambda prompt: "answer", TOKENIZER)
        self.failures = failures

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams, *, session: str = "") -> Generation:
        if self.failures:
            self.failures -= 1
            raise ModelFailed("the engine died")
        return await super().generate(prompt_ids, sampling, session=session)


def test_an_engine_failure_starts_the_episode_over(tmp_path: Path) -> None:
    episode = run(tmp_path, SPEAK + "return WorkflowOutput(reward=1.0)", engine=Flaky(2))
    assert (episode.stop_reason, episode.retries, episode.reward) == (StopReason.COMPLETED, 2, 1.0)


def test_an_engine_failure_that_the_agent_swallows_is_still_no_reward(tmp_path: Path) -> None:
    body = "try:\n    await ask(model_tuner)\nexcept Exception:\n    pass\nreturn WorkflowOutput(reward=1.0)"
    episode = run(tmp_path, body, engine=Flaky(10))
    assert (episode.stop_reason, episode.reward) == (StopReason.MODEL_FAILED, None)


def test_a_context_that_overflows_is_judged_as_it_stands(tmp_path: Path) -> None:
    engine = FakeEngine(("answer",), TOKENIZER, max_model_len=10)
    episode = run(tmp_path, SPEAK + "return WorkflowOutput(reward=1.0)", engine=engine)
    assert (episode.stop_reason, episode.reward, episode.reward_source) == (StopReason.CONTEXT_OVERFLOW, 0.5, "judge")


def test_a_cut_off_last_answer_is_truncated_and_still_judged(tmp_path: Path) -> None:
    episode = run(
        tmp_path, SPEAK + "return WorkflowOutput()", settings=_yaml("rollout: {max_response_length_in_one_turn: 3}")
    )
    assert (episode.stop_reason, episode.reward) == (StopReason.TRUNCATED, 0.5)


def test_the_turn_limit_ends_an_episode_as_truncated(tmp_path: Path) -> None:
    body = "while True:\n    await ask(model_tuner)"
    episode = run(tmp_path, body, settings=_yaml("rollout: {multi_turn: {max_steps: 2}}"))
    assert (episode.stop_reason, len(episode.turns), episode.reward) == (StopReason.TRUNCATED, 2, 0.5)


@pytest.mark.parametrize("terminate", [True, False])
def test_nonsense_gets_the_configured_reward_whatever_the_workflow_says(tmp_path: Path, terminate: bool) -> None:
    body = "for _ in range(3):\n    reply = await ask(model_tuner)\nreturn WorkflowOutput(reward=1.0)"
    settings = _yaml(f"rollout: {{agent_madness_reward: -1.0, agent_madness_termination: {str(terminate).lower()}}}")
    episode = run(tmp_path, body, settings=settings, replies=lambda prompt: "very good " * 30)
    assert (episode.stop_reason, episode.reward, episode.reward_source) == (StopReason.CHECK_ABORTED, -1.0, "check")
    assert len(episode.turns) == (1 if terminate else 3)
    assert episode.is_success is False


def test_a_runner_survives_pickling_and_finds_its_parts_again(tmp_path: Path) -> None:
    runner = make_runner(tmp_path, SPEAK + "return WorkflowOutput(reward=1.0)")
    runner.prepare()
    again = pickle.loads(pickle.dumps(runner))
    episode = asyncio.run(
        again.run(workflow_task(), FakeEngine(("answer",), TOKENIZER), ChatCodec(TOKENIZER), SAMPLING)
    )
    assert episode.reward == 1.0


def test_what_cannot_be_found_shows_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="Nope"):
        make_runner(tmp_path, "pass", workflow="Nope").prepare()
    with pytest.raises(ConfigError, match="no check is called"):
        EpisodeRunner(
            fake_config(
                tmp_path,
                _yaml("rollout: {compute_madness_checklist: [gibberish]}"),
                ["astuner.rollout.workflow=mine.py->W"],
            )
        ).prepare()


def _yaml(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.split("\n"))
