"""Whatever user code and infrastructure do, an episode comes out, and only honest ones carry a reward."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from astuner.chat.codec import ChatCodec
from astuner.contracts.backbone import InferenceEngine
from astuner.contracts.errors import ConfigError, ModelFailed, PluginError
from astuner.contracts.types import Episode, Generation, SamplingParams, Split, StopReason
from astuner.rollout.metrics import rollout_metrics
from astuner.rollout.models import one_model
from astuner.rollout.pool import Group
from astuner.rollout.runner import EpisodeRunner
from astuner_testing.fakes import FakeEngine, fake_config, make_tokenizer, workflow_task
from tests.table import table

TOKENIZER = make_tokenizer()
SAMPLING = SamplingParams(max_tokens=200)

USER_CODE = """
import asyncio, concurrent.futures, sys, time
from astuner import Judge, JudgeOutput, Workflow, WorkflowOutput
from astuner.contracts.errors import ContextOverflow, EnvironmentFailed, JudgeFailed, ModelFailed, TurnLimitReached

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
    return asyncio.run(runner.run(workflow_task(), one_model(engine, ChatCodec(TOKENIZER)), SAMPLING))


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
    folder = tmp_path / f"run{len(list(tmp_path.iterdir()))}"  # a file is imported once
    folder.mkdir()
    (folder / "mine.py").write_text(code)
    overrides = [f"astuner.rollout.workflow=mine.py->{workflow}"]
    if with_judge:
        overrides.append(f"astuner.task_judge.judge=mine.py->{with_judge}")
    return EpisodeRunner(fake_config(folder, settings, overrides))


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


def test_a_returned_text_is_the_response_to_judge(tmp_path: Path) -> None:
    judge = "return float(output.response == 'answer')"
    episode = run(tmp_path, SPEAK + "return reply.message['content']", judge=judge)
    assert (episode.reward, episode.reward_source) == (1.0, "judge"), episode.error
    episode = run(tmp_path, "return 'answer'", with_judge=None)
    assert "returned no reward and no judge is configured. Set astuner.task_judge.judge" in episode.error


def test_a_judge_may_be_async_and_the_seeds_judge_gets_the_config_and_returns_a_tuple(tmp_path: Path) -> None:
    episode = run(tmp_path, SPEAK + "return WorkflowOutput()", with_judge="OldJudge")
    assert (episode.reward, episode.is_success) == (2.0, False)


def test_a_plain_function_workflow_runs_in_a_thread_and_a_function_of_two_is_a_workflow(tmp_path: Path) -> None:
    episode = run(tmp_path, "pass", workflow="Sync")
    assert episode.output is not None, episode.error
    assert episode.output.response == "answer"
    assert run(tmp_path, "pass", workflow="function").reward == 1.0


@table(
    ("body", "reason", "says"),
    [
        ("raise ValueError('my bug')", StopReason.WORKFLOW_FAILED, "ValueError: my bug"),
        ("return None", StopReason.WORKFLOW_FAILED, "as text. Add the missing return ("),
        ("return (x for x in 'ab')", StopReason.WORKFLOW_FAILED, "Use return instead of yield"),
        ("yield 1.0", StopReason.WORKFLOW_FAILED, "Use return instead of yield"),
        ("return await ask(model_tuner)", StopReason.WORKFLOW_FAILED, 'use reply.message["content"]'),
        ("return {'reward': 1, 'is_success': True}", StopReason.WORKFLOW_FAILED, "(reward=…, is_success=…) instead of"),
        ("return ('answer', 1.0)", StopReason.WORKFLOW_FAILED, "must return a WorkflowOutput"),
        ("return WorkflowOutput(response=asyncio.Future())", StopReason.WORKFLOW_FAILED, "add await before the call"),
        ("return WorkflowOutput", StopReason.WORKFLOW_FAILED, "must return a WorkflowOutput"),
        ("return WorkflowOutput(reward=float('nan'))", StopReason.WORKFLOW_FAILED, "finite number"),
        ("return WorkflowOutput(reward=[1.0])", StopReason.WORKFLOW_FAILED, "finite number"),
        ("raise SystemExit(3)", StopReason.WORKFLOW_FAILED, "the workflow called sys.exit(3) ("),
        ("class Panic(BaseException): pass\nraise Panic('rust')", StopReason.WORKFLOW_FAILED, "raised Panic: rust"),
        ("raise asyncio.CancelledError", StopReason.WORKFLOW_FAILED, "cancelled itself"),
        ("return WorkflowOutput(reward=10**400)", StopReason.WORKFLOW_FAILED, "finite number"),
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


@table(
    ("judge", "says"),
    [
        ("raise KeyError('answer')", "raised KeyError"),
        ("return JudgeOutput(reward=float('inf'))", "finite number"),
        ("return None", "must return a JudgeOutput or a finite number from -1e9 to 1e9. Add the missing return"),
        ("yield 1.0", "Use return instead of yield"),
        ("return (None, False)", "finite number"),
        ("time.sleep(60)", "judge_timeout"),
        ("sys.exit(2)", "the judge J called sys.exit(2)"),
        ("raise asyncio.CancelledError", "cancelled itself"),
        ("raise concurrent.futures.CancelledError", "the judge J"),
    ],
)
def test_a_judge_that_fails_or_hangs_gives_no_reward_and_is_asked_again(tmp_path: Path, judge: str, says: str) -> None:
    settings = f"task_judge: {{judge_timeout: {0.2 if 'sleep' in judge else 60}}}\nrollout: {{max_retries: 1}}"
    episode = run(tmp_path, SPEAK + "return WorkflowOutput()", judge=judge, settings=_yaml(settings))
    assert (episode.stop_reason, episode.reward, episode.retries) == (StopReason.JUDGE_FAILED, None, 1)
    assert says in episode.error
    assert episode.reward_source == ""


def test_a_judge_that_fails_is_asked_about_the_same_output_and_the_policy_never_again(tmp_path: Path) -> None:
    judge = "self.asked += 1\nassert self.asked > 2\nreturn JudgeOutput(reward=0.5, metrics={'asked': self.asked})"
    engine = FakeEngine(("answer",), TOKENIZER)
    episode = run(tmp_path, SPEAK + "return WorkflowOutput()", judge=judge, engine=engine)
    assert (episode.stop_reason, episode.reward, episode.retries) == (StopReason.COMPLETED, 0.5, 2)
    assert len(engine.calls) == 1
    always = run(tmp_path, SPEAK + "return WorkflowOutput()", judge="raise KeyError('x')", replies=("answer",))
    assert (always.stop_reason, always.retries) == (StopReason.JUDGE_FAILED, 2)


def test_retries_of_the_engine_and_of_the_judge_are_counted_together(tmp_path: Path) -> None:
    episode = run(tmp_path, SPEAK + "return WorkflowOutput()", judge="raise KeyError('x')", engine=Flaky(2))
    assert (episode.stop_reason, episode.retries) == (StopReason.JUDGE_FAILED, 4)


def test_our_own_cancellation_passes_through_a_judge(tmp_path: Path) -> None:
    runner = make_runner(tmp_path, SPEAK + "return WorkflowOutput()", judge="time.sleep(60)")

    async def main() -> bool:
        engine = FakeEngine(("answer",), TOKENIZER)
        task = asyncio.ensure_future(runner.run(workflow_task(), one_model(engine, ChatCodec(TOKENIZER)), SAMPLING))
        while not engine.calls:
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait({task})
        return task.cancelled()

    assert asyncio.run(main())


METRICS = ["None", "'many'", "float('nan')", "float('inf')", "10**400", "[1.0]"]


@table("value", METRICS)
def test_a_metric_that_is_no_finite_number_fails_its_episode_and_is_named(tmp_path: Path, value: str) -> None:
    mine = run(tmp_path, SPEAK + f"return WorkflowOutput(reward=1.0, metrics={{'x': {value}}})")
    assert (mine.stop_reason, mine.reward) == (StopReason.WORKFLOW_FAILED, None)
    assert "the workflow returned the metric x = " in mine.error
    judges = run(
        tmp_path, SPEAK + "return WorkflowOutput()", judge=f"return JudgeOutput(reward=1.0, metrics={{'x': {value}}})"
    )
    assert (judges.stop_reason, judges.reward) == (StopReason.JUDGE_FAILED, None)
    assert "the judge J returned the metric x = " in judges.error
    group = Group(group_id="group", task=mine.workflow_task.task, episodes=(mine, judges))
    assert rollout_metrics([group])["rollout/errored_frac"] == 1.0


@table(("metrics", "says"), [("None", "the metrics None"), ("{1: 2.0}", "a metric called 1")])
def test_metrics_that_are_no_mapping_of_names_fail_their_episode(tmp_path: Path, metrics: str, says: str) -> None:
    episode = run(tmp_path, SPEAK + f"return WorkflowOutput(reward=1.0, metrics={metrics})")
    assert episode.stop_reason is StopReason.WORKFLOW_FAILED
    assert says in episode.error


def test_any_finite_number_is_a_metric(tmp_path: Path) -> None:
    body = SPEAK + "import numpy\nreturn WorkflowOutput(reward=1, metrics={'a': True, 'b': numpy.float32(0.5), 'c': 3})"
    episode = run(tmp_path, body)
    assert episode.output is not None, episode.error
    assert episode.output.metrics == {"a": 1.0, "b": 0.5, "c": 3.0}


def test_numbers_as_large_as_they_get_do_not_break_a_steps_metrics(tmp_path: Path) -> None:
    episode = run(tmp_path, SPEAK + "return WorkflowOutput(reward=1e9, metrics={'x': -1.7e308})")
    group = Group(group_id="group", task=episode.workflow_task.task, episodes=(episode,) * 3)
    metrics = rollout_metrics([group])
    assert metrics["reward/mean"] == pytest.approx(1e9)
    assert metrics["workflow/x"] == pytest.approx(-1.7e308)


def test_no_reward_and_no_judge_is_an_error_not_a_zero(tmp_path: Path) -> None:
    episode = run(tmp_path, SPEAK + "return WorkflowOutput()", with_judge=None)
    assert (episode.reward, episode.retries) == (None, 0)
    assert "no judge is configured" in episode.error


@table(
    "body",
    [
        "await asyncio.sleep(60)",
        "try:\n    await asyncio.sleep(60)\nexcept asyncio.CancelledError:\n    return WorkflowOutput(reward=1.0)",
    ],
)
def test_a_workflow_that_never_ends_times_out_even_if_it_swallows_the_cancellation(tmp_path: Path, body: str) -> None:
    episode = run(tmp_path, body, settings=_yaml("rollout: {episode_timeout: 0.1}"))
    assert (episode.stop_reason, episode.reward) == (StopReason.TIMED_OUT, None)


FOREVER = """
while True:
    try:
        CALL
    except Exception:
        await asyncio.sleep(0.01)
"""
IN_A_THREAD = """
import threading
over = threading.Event()

def loop():
    while not over.is_set():
        try:
            model_tuner.chat_sync([{'role': 'user', 'content': 'hi'}])
        except Exception:
            time.sleep(0.01)

try:
    await asyncio.to_thread(loop)
finally:
    over.set()
"""
SPEAKS_ON = "said += [(await model_tuner.chat(said)).message, {'role': 'user', 'content': 'x'}]"
HI = "[{'role': 'user', 'content': 'hi'}]"
STEPS = ", multi_turn: {max_steps: 2}"


def forever(call: str, before: str = "pass") -> str:
    return before + FOREVER.replace("CALL", call)


@pytest.mark.slow
@table(
    "body, rollout, data, key",
    [
        (forever("await ask(model_tuner)"), STEPS, "{}", "astuner.rollout.multi_turn.max_steps"),
        (forever(f"await model_tuner.chat({HI}, agent_name='critic')"), STEPS, "{}", "agent 'critic' has used its 2"),
        (forever("await asyncio.gather(*(ask(model_tuner) for _ in range(5)))"), STEPS, "{}", "multi_turn.max_steps"),
        (forever("await asyncio.create_task(ask(model_tuner))"), STEPS, "{}", "astuner.rollout.multi_turn.max_steps"),
        (forever("await asyncio.wait_for(ask(model_tuner), 9)"), STEPS, "{}", "astuner.rollout.multi_turn.max_steps"),
        (IN_A_THREAD, STEPS, "{}", "astuner.rollout.multi_turn.max_steps"),
        (forever("await ask(model_tuner, 'x' * 400)"), "", "{}", "astuner.rollout.max_model_len"),
        (forever("await ask(model_tuner, 'x' * 400)", SPEAK), "", "{}", "astuner.rollout.max_model_len"),
        (forever("await ask(model_tuner, 'x' * 99)"), "", "{max_prompt_length: 80}", "astuner.data.max_prompt_length"),
        (forever(SPEAKS_ON, f"said = {HI}"), "", "{max_response_length: 90}", "astuner.data.max_response_length"),
        (forever(f"await model_tuner.chat({HI}, temperature=0.3)"), "", "{}", "rollout.temperature"),
        (forever("await model_tuner.chat([{'role': 'user', 'content': {'t': 21}}])"), "", "{}", "messages[0].content"),
        (forever(f"await model_tuner.chat({HI}, tool_choice='required')"), "", "{}", "tool_choice"),
    ],
)
def test_a_refusal_that_an_agent_ignores_until_the_time_is_up_is_named(
    tmp_path: Path, body: str, rollout: str, data: str, key: str
) -> None:
    settings = f"rollout: {{episode_timeout: 0.5{rollout}}}\ndata: {data}"
    engine = FakeEngine(lambda prompt: "answer", TOKENIZER, max_model_len=300)
    episode = run(tmp_path, body, settings=_yaml(settings), engine=engine)
    assert episode.stop_reason is StopReason.TIMED_OUT
    assert "rollout.episode_timeout = 0.5 s" in episode.error
    assert key in episode.error


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


GROW = "while True:\n    await ask(model_tuner, 'x' * 20 * len(model_tuner._episode.recorder.turns))\n"
"""Asks with longer and longer prompts."""
GOES_ON = "said.append((await model_tuner.chat(said)).message)\nsaid.append({'role': 'user', 'content': 'go on'})"
GROWN = "n += 1\nawait ask(model_tuner, 'x' * 20 * n)"

SEES_THE_END = """
assert output.response == "answer", output
return JudgeOutput(reward=0.5 if output.metadata == {"stop_reason": "%s"} else 0.0)
"""


def full(tokens: int = 58) -> FakeEngine:
    return FakeEngine(lambda prompt: "answer", TOKENIZER, max_model_len=tokens)


def test_a_context_that_overflows_is_judged_by_its_last_reply(tmp_path: Path) -> None:
    episode = run(tmp_path, GROW, engine=full(), judge=SEES_THE_END % "context_overflow")
    assert (episode.stop_reason, episode.reward, episode.reward_source) == (
        StopReason.CONTEXT_OVERFLOW,
        0.5,
        "judge",
    ), episode.error
    assert episode.output is None


def test_an_agent_that_copes_with_an_overflow_is_judged_by_what_it_returns(tmp_path: Path) -> None:
    body = f"try:\n{indent(GROW)}\nexcept ContextOverflow:\n    return WorkflowOutput(reward=0.75)"
    episode = run(tmp_path, body, engine=full())
    assert (episode.stop_reason, episode.reward, episode.reward_source) == (
        StopReason.CONTEXT_OVERFLOW,
        0.75,
        "workflow",
    )


def test_a_first_prompt_that_does_not_fit_is_named_and_neither_scored_nor_tried_again(tmp_path: Path) -> None:
    engine = full(10)
    caught = "try:\n    await ask(model_tuner)\nexcept Exception:\n    return WorkflowOutput(reward=1.0)"
    for body in (SPEAK, caught):
        episode = run(tmp_path, body, engine=engine)
        assert (episode.stop_reason, episode.reward, episode.retries) == (StopReason.PROMPT_TOO_LONG, None, 0)
        assert "task 'task'" in episode.error
    limited = run(tmp_path, SPEAK, settings=_yaml("data: {max_prompt_length: 3}"))
    assert limited.stop_reason is StopReason.PROMPT_TOO_LONG
    assert "data.max_prompt_length is 3" in limited.error


WRAP = """
try:
%s
except Exception as e:
    raise RuntimeError('the agent failed')%s
"""


@pytest.mark.parametrize("how", [" from e", "", " from None"])
@pytest.mark.parametrize(
    ("body", "engine", "reason", "reward"),
    [
        (GROW, lambda: full(), StopReason.CONTEXT_OVERFLOW, 0.5),
        (SPEAK, lambda: full(10), StopReason.PROMPT_TOO_LONG, None),
        (SPEAK, lambda: Flaky(9), StopReason.MODEL_FAILED, None),
        (SPEAK * 9, lambda: full(90), StopReason.TRUNCATED, 0.5),
        (SPEAK + "raise ValueError('mine')", lambda: full(), StopReason.WORKFLOW_FAILED, None),
    ],
)
def test_what_a_framework_wraps_is_called_by_what_happened_first(
    tmp_path: Path, how: str, body: str, engine: Any, reason: StopReason, reward: float | None
) -> None:
    settings = _yaml("rollout: {multi_turn: {max_steps: 8}}")
    episode = run(tmp_path, WRAP % (indent(body), how), engine=engine(), settings=settings)
    assert (episode.stop_reason, episode.reward) == (reason, reward), episode.error


@table(
    ("raised", "reason"),
    [
        ("raise RuntimeError from EnvironmentFailed('gone')", StopReason.ENVIRONMENT_FAILED),
        ("raise RuntimeError from ContextOverflow('full')", StopReason.CONTEXT_OVERFLOW),
        ("e = ValueError()\ne.__cause__ = e\nraise e", StopReason.WORKFLOW_FAILED),
    ],
)
def test_what_a_workflow_says_itself_counts_even_when_it_is_wrapped(
    tmp_path: Path, raised: str, reason: StopReason
) -> None:
    assert run(tmp_path, SPEAK + raised).stop_reason is reason


def test_an_environment_that_fails_after_an_overflow_is_no_reward(tmp_path: Path) -> None:
    body = f"try:\n{indent(GROW)}\nexcept ContextOverflow:\n    raise EnvironmentFailed('gone')"
    episode = run(tmp_path, body, engine=full(), settings=_yaml("rollout: {max_retries: 0}"))
    assert (episode.stop_reason, episode.error) == (StopReason.ENVIRONMENT_FAILED, "gone")


def test_a_temperature_of_the_agents_own_fails_a_training_episode_even_if_it_is_swallowed(tmp_path: Path) -> None:
    body = """
try:
    await model_tuner.chat([{"role": "user", "content": "hi"}], temperature=0.1)
except Exception:
    pass
return WorkflowOutput(reward=1.0)
"""
    episode = run(tmp_path, body)
    assert (episode.stop_reason, episode.reward) == (StopReason.WORKFLOW_FAILED, None)
    assert "rollout.temperature" in episode.error


def test_a_cut_off_last_answer_is_truncated_and_still_judged(tmp_path: Path) -> None:
    episode = run(
        tmp_path, SPEAK + "return WorkflowOutput()", settings=_yaml("rollout: {max_response_length_in_one_turn: 3}")
    )
    assert (episode.stop_reason, episode.reward) == (StopReason.TRUNCATED, 0.5)


def test_the_turn_limit_ends_an_episode_as_truncated(tmp_path: Path) -> None:
    body = "while True:\n    await ask(model_tuner)"
    settings = _yaml("rollout: {multi_turn: {max_steps: 2}}")
    episode = run(tmp_path, body, settings=settings, judge=SEES_THE_END % "truncated")
    assert (episode.stop_reason, len(episode.turns), episode.reward) == (StopReason.TRUNCATED, 2, 0.5)


LIMITS = {
    "calls": ("await ask(model_tuner)", "rollout: {multi_turn: {max_steps: 2}, %s}", "rollout.multi_turn.max_steps"),
    "context": (GROWN, "rollout: {max_model_len: 58, %s}", "rollout.max_model_len"),
    "episode": (GOES_ON, "data: {max_response_length: 30}\nrollout: {%s}", "data.max_response_length"),
    "reply": (
        "await ask(model_tuner)\nraise StopAsyncIteration",
        "rollout: {max_response_length_in_one_turn: 3, %s}",
        "rollout.max_response_length_in_one_turn",
    ),
}
"""Limit -> what a workflow asks again and again, settings, and the key that the message must name."""


def test_an_episode_that_ends_at_a_limit_is_worth_what_the_rule_says_and_names_the_limit(tmp_path: Path) -> None:
    nothing, half, most = (
        "return WorkflowOutput()",
        "return JudgeOutput(reward=0.5)",
        "return WorkflowOutput(reward=0.75)",
    )
    wrong = []
    for limit, (asks, settings, key) in LIMITS.items():
        rules = [
            ("judge", nothing, "", (0.0, "limit")),
            ("judge", "raise", half, (0.5, "judge")),
            ("-0.25", most, half, (-0.25, "limit")),
            ("drop", most, half, (None, "")),
            ("judge", "raise", "", (0.0, "limit")),
            ("judge", nothing, half, (0.5, "judge")),
            ("judge", most, half, (0.75, "workflow")),
            ("judge", nothing, "raise KeyError('answer')", (None, "")),
            ("-0.25", "raise", "raise KeyError('answer')", (-0.25, "limit")),
        ]
        for rule, returns, judge, expected in rules if limit == "calls" else rules[:4]:
            if limit == "reply" and returns == "raise":
                continue  # a reply that was cut off raises nothing
            caught = "(ContextOverflow, TurnLimitReached, StopAsyncIteration)"
            said = "said = [{'role': 'user', 'content': 'hi'}]"
            body = f"n = 0\n{said}\ntry:\n    while True:\n{indent(asks)}\nexcept {caught}:\n    {returns}"
            episode = run(
                tmp_path,
                body,
                judge=judge or "pass",
                settings=_yaml(settings % f"truncated_reward: {rule}, max_retries: 0"),
                engine=FakeEngine(lambda prompt: "answer", TOKENIZER, max_model_len=58 if limit == "context" else 4096),
                with_judge="J" if judge else None,
            )
            if (episode.reward, episode.reward_source) != expected or f"astuner.{key}" not in episode.error:
                wrong.append((limit, rule, returns, judge, episode.stop_reason, episode.reward, episode.error))
            if rule == "drop" and episode.stop_reason is not StopReason.LEFT_OUT:
                wrong.append((limit, rule, episode.stop_reason))
    assert not wrong


def test_an_error_of_the_workflows_own_stays_one_after_a_reply_that_was_cut_off_and_names_the_limit(
    tmp_path: Path,
) -> None:
    settings = _yaml("rollout: {max_response_length_in_one_turn: 3}")
    episode = run(tmp_path, SPEAK + "raise ValueError('no JSON')", settings=settings, with_judge=None)
    assert (episode.stop_reason, episode.reward) == (StopReason.WORKFLOW_FAILED, None)
    assert "ValueError: no JSON" in episode.error
    assert "raise astuner.rollout.max_response_length_in_one_turn" in episode.error


def test_a_measurement_leaves_nothing_out_that_ended_at_a_limit(tmp_path: Path) -> None:
    settings = _yaml("rollout: {max_response_length_in_one_turn: 3, truncated_reward: drop}")
    runner = make_runner(tmp_path, SPEAK + "return WorkflowOutput()", settings=settings, with_judge=None)
    models = one_model(FakeEngine(("answer",), TOKENIZER), ChatCodec(TOKENIZER))
    task = replace(workflow_task(), split=Split.VALIDATION)
    episode = asyncio.run(runner.run(task, models, SAMPLING))
    assert (episode.stop_reason, episode.reward) == (StopReason.TRUNCATED, 0.0)


@table("terminate", [True, False])
def test_nonsense_gets_the_configured_reward_whatever_the_workflow_says(tmp_path: Path, terminate: bool) -> None:
    body = "for _ in range(3):\n    reply = await ask(model_tuner)\nreturn WorkflowOutput(reward=1.0)"
    settings = _yaml(f"rollout: {{agent_madness_reward: -1.0, agent_madness_termination: {str(terminate).lower()}}}")
    episode = run(tmp_path, body, settings=settings, replies=lambda prompt: "So <|start_header_id|>user")
    assert (episode.stop_reason, episode.reward, episode.reward_source) == (StopReason.CHECK_ABORTED, -1.0, "check")
    assert len(episode.turns) == (1 if terminate else 3)
    assert episode.is_success is False


def test_a_runner_survives_pickling_and_finds_its_parts_again(tmp_path: Path) -> None:
    runner = make_runner(tmp_path, SPEAK + "return WorkflowOutput(reward=1.0)")
    runner.prepare()
    again = pickle.loads(pickle.dumps(runner))
    episode = asyncio.run(
        again.run(workflow_task(), one_model(FakeEngine(("answer",), TOKENIZER), ChatCodec(TOKENIZER)), SAMPLING)
    )
    assert episode.reward == 1.0


def test_what_cannot_be_found_shows_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="Nope"):
        make_runner(tmp_path, "pass", workflow="Nope").prepare()
    with pytest.raises(ConfigError, match="unknown output check"):
        make_runner(tmp_path, "pass", settings=_yaml("rollout: {compute_madness_checklist: [gibberish]}")).prepare()


def _yaml(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.split("\n"))
