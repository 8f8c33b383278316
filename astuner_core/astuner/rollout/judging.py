"""From a workflow's output to a verdict: its own reward, or the judge's, which sees one attempt or a whole group.

A judge that fails is asked again about the same output: rolling out again for it would select what it can judge.
Where the judge compares attempts (`astuner.contracts.judge.GroupJudge`), one whose reward is open ends without a
verdict, though it ended in a way that is scored; when all of its group have ended, the judge is asked about those
together, once.

Invariants: there is a verdict for every agent that trained, or none at all; and what `Judging.judged` returns has a
verdict, or has ended as `StopReason.JUDGE_FAILED`.  What a workflow or a judge returned is checked
once, so that nothing behind it has to doubt a number.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from astuner.contracts.environment import Evaluation
from astuner.contracts.errors import ConfigError, EpisodeAborted, JudgeFailed, safe_text, shown
from astuner.contracts.judge import Attempt, GroupJudge
from astuner.contracts.scalars import as_bool, as_float
from astuner.contracts.types import (
    A_REWARD,
    DEFAULT_AGENT,
    Episode,
    JudgeOutput,
    StopReason,
    Turn,
    WorkflowOutput,
    WorkflowTask,
    as_reward,
    check_success,
)
from astuner.plugins.user_code import written_at
from astuner.rollout.endings import before_that, late, story, unfinished
from astuner.rollout.rewards import no_reward
from astuner.rollout.task_copy import copy_attempt
from astuner.rollout.threads import Misbehaved, OutOfTime, TimeLimits, contained
from astuner.support.threads import in_daemon_thread

if TYPE_CHECKING:
    from astuner.config import Config


LONGEST_VALUE = 200
"""Characters of a refused value that a message shows."""


def as_output(returned: Any) -> WorkflowOutput:
    """Accept our `WorkflowOutput`, one shaped like agentscope.tuner's, or a bare reward (or agents' rewards)."""
    if isinstance(returned, WorkflowOutput):
        output = returned
    elif isinstance(returned, Mapping) or as_float(returned) is not None:
        output = WorkflowOutput(reward=returned)
    elif hasattr(returned, "reward") and hasattr(returned, "response") and not isinstance(returned, type):
        metrics = getattr(returned, "metrics", None) or {}
        output = WorkflowOutput(reward=returned.reward, response=returned.response, metrics=metrics)
    else:
        raise Misbehaved(f"returned {_brief(returned)}; it must return a WorkflowOutput{_or_a_number(returned)}")
    if not isinstance(output.evaluation, (Evaluation, type(None))):
        raise Misbehaved(f"returned the evaluation {_brief(output.evaluation)}; it must be an Evaluation or None")
    reward = None if output.reward is None else _as_reward(output.reward, ", or None to ask the judge")
    success = _as_success(output.is_success)
    return replace(output, reward=reward, is_success=success, metrics=_as_metrics(output.metrics))


def checked(read: Callable[[Any], T], answer: Any, by: Any) -> T:
    """What ``read`` makes of an answer; where it refuses that, it says where ``by``, which gave it, is written.

    :raises Misbehaved: it is refused.
    """
    try:
        return read(answer)
    except Misbehaved as e:
        code = _code_of(by)
        at = written_at(code)
        raise Misbehaved(f"{e} ({at} in {code.__name__})" if at else str(e)) from None


def _code_of(asked: Any) -> Any:
    """Return the function or class that a callable is written as, below `functools.partial` and ``__call__``."""
    while isinstance(asked, functools.partial):
        asked = asked.func
    return asked if hasattr(asked, "__name__") else type(asked)


def as_verdict(answer: Any) -> JudgeOutput:
    """Accept our `JudgeOutput`, one shaped like it, a bare reward, True or False, or the seeds' pair."""
    if isinstance(answer, JudgeOutput):
        said = _verdict(answer.rewards or answer.reward, answer.is_success, _as_metrics(answer.metrics))
        return replace(said, reward=answer.reward)
    if isinstance(answer, tuple) and len(answer) == 2:
        return _verdict(answer[0], answer[1], {})
    if as_float(answer) is not None:
        return _verdict(answer, as_bool(answer), {})
    if hasattr(answer, "reward"):
        return _verdict(answer.reward, None, _as_metrics(getattr(answer, "metrics", None) or {}))
    raise Misbehaved(f"returned {_brief(answer)}; it must return a JudgeOutput{_or_a_number(answer)}")


def as_verdicts(answer: Any, wanted: int) -> list[JudgeOutput | JudgeFailed]:
    """What a group judge says of ``wanted`` attempts."""
    if getattr(answer, "shape", ()) and hasattr(answer, "tolist"):  # an array of rewards
        answer = answer.tolist()
    if not isinstance(answer, Sequence) or isinstance(answer, str):
        raise Misbehaved(f"returned {_brief(answer)}; it must return a sequence with a JudgeOutput for each attempt")
    if len(answer) != wanted:
        raise Misbehaved(f"returned {len(answer)} verdicts for {wanted} attempts; it must return one for each")
    return [one if isinstance(one, JudgeFailed) else as_verdict(one) for one in answer]


def _verdict(reward: Any, is_success: Any, metrics: Mapping[str, float]) -> JudgeOutput:
    found, success = _as_reward(reward), _as_success(is_success)
    if isinstance(found, Mapping):
        return JudgeOutput.per_agent(found, is_success=success, metrics=metrics)
    return JudgeOutput(reward=found, is_success=success, metrics=metrics)


def _as_reward(reward: Any, otherwise: str = "") -> float | dict[str, float]:
    """:param otherwise: what else it may be, for the message."""
    if not isinstance(reward, Mapping):
        if (number := as_reward(reward)) is None:
            raise Misbehaved(f"returned the reward {_brief(reward)}; it must be {A_REWARD}{otherwise}")
        return number
    if not reward:
        raise Misbehaved("returned an empty mapping of rewards; it must name every agent or role that trains")
    found = {name: as_reward(own) for name, own in reward.items()}
    for name, number in found.items():
        if not isinstance(name, str) or number is None:
            said = f"{_brief(name)}: {_brief(reward[name])}"
            raise Misbehaved(f"returned the reward {said}; it must be an agent's name and {A_REWARD}")
    return {name: number for name, number in found.items() if number is not None}


def _as_success(value: Any) -> bool | None:
    try:
        return check_success("is_success", value)
    except ValueError as e:
        raise Misbehaved(f"returned a verdict that is refused: {e}") from None


def _as_metrics(metrics: Any) -> dict[str, float]:
    """The metrics as floats: they are averaged over a step, where one that is no number would spoil all."""
    if not isinstance(metrics, Mapping):
        raise Misbehaved(f"returned the metrics {_brief(metrics)}; they must be a mapping of names to finite numbers")
    found = {}
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise Misbehaved(f"returned a metric called {_brief(name)}; its name must be a string")
        if (number := as_float(value)) is None:
            said = f"{name} = {_brief(value)}"
            raise Misbehaved(f"returned the metric {said}; it must be a finite number, or be left out")
        found[name] = number
    return found


def _brief(value: Any) -> str:
    """Return a refused value for a message: in one line, and short."""
    text = " ".join(shown(value).split())
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}… ({type(value).__name__})"


def _or_a_number(value: Any) -> str:
    """Return what else is accepted, where somebody seems to have meant a number."""
    meant = hasattr(type(value), "__float__") or isinstance(value, (str, bytes, complex, tuple, list))
    return f", or {A_REWARD}" if meant else ""


T = TypeVar("T")


class NoVerdict(Exception):
    """There is none for good; `reason` says whose failure that is."""

    def __init__(self, message: str, *, reason: StopReason = StopReason.JUDGE_FAILED, asked_again: int = 0) -> None:
        super().__init__(message)
        self.reason = reason
        self.asked_again = asked_again


class Judging:
    """Gives every scored attempt its verdict.

    :param judge: None where the workflow sets rewards.
    :param workflow_at: the file and line of the workflow, for messages.
    """

    def __init__(self, config: Config, judge: Any, limits: TimeLimits, workflow_at: str = "") -> None:
        self._workflow_at = workflow_at
        self._settings = config.astuner
        self._judge = judge
        self._limits = limits
        self.by_group = isinstance(judge, GroupJudge)
        """Whether the judge is asked about whole groups."""

    def leaves_open(self, output: WorkflowOutput | None, reason: StopReason) -> bool:
        """Whether an attempt that ended so gets its verdict when the others of its group have ended too."""
        return self.by_group and reason is not StopReason.CHECK_ABORTED and self._asks(output, reason)

    def wants_evaluation(self, output: WorkflowOutput | None, reason: StopReason) -> bool:
        """Whether the judge will be asked about an attempt that ended so, and wants its environment's evaluation."""
        if not getattr(self._judge, "wants_evaluation", False) or not self._asks(output, reason):
            return False
        if reason is StopReason.CHECK_ABORTED:
            rollout = self._settings.rollout
            return output is not None and bool(self._settings.agents) and not rollout.agent_madness_termination
        return True

    def _asks(self, output: WorkflowOutput | None, reason: StopReason) -> bool:
        """Whether an attempt that ended so is scored, and neither the workflow nor the config says how."""
        return reason.is_scored and not self._fixed(reason) and (output is None or output.reward is None)

    def _fixed(self, reason: StopReason) -> JudgeOutput | None:
        """The verdict on an attempt that ended so, where `rollout.truncated_reward` is a number."""
        reward = self._settings.rollout.truncated_reward
        return JudgeOutput(reward=reward, is_success=False) if reason.is_limit and isinstance(reward, float) else None

    # ------------------------------------------------------------ one attempt

    async def verdict(
        self,
        workflow_task: WorkflowTask,
        output: WorkflowOutput,
        turns: Sequence[Turn],
        ended: StopReason = StopReason.COMPLETED,
    ) -> tuple[JudgeOutput, str, int]:
        """The verdict, where it comes from, and how many times the judge was asked again for it.

        :raises NoVerdict: there is none.
        """
        asked_again, source = 0, "workflow"
        if (fixed := self._fixed(ended)) is not None:
            return fixed, "limit", 0
        if output.reward is None and self._judge is None and ended.is_limit:
            return JudgeOutput(reward=0.0, is_success=False), "limit", 0
        if output.reward is not None:
            verdict = _verdict(output.reward, output.is_success, {})
        else:
            source = "judge"
            verdict, asked_again = await self._ask(workflow_task, output)
        return self._for_everybody(verdict, turns, source), source, asked_again

    async def punish(
        self,
        workflow_task: WorkflowTask,
        output: WorkflowOutput | None,
        turns: Sequence[Turn],
        complaints: Sequence[EpisodeAborted],
    ) -> JudgeOutput:
        """What an attempt is worth in which a check fired.

        Where agents are named, only those it fired on are punished; the others keep their own rewards if the episode
        went on to its end, and have none if it did not.
        """
        reward = self._settings.rollout.agent_madness_reward
        mad = {c.turn.agent for c in complaints if c.turn is not None}
        if not self._settings.agents or not mad:
            return JudgeOutput(reward=reward, is_success=False)
        rewards = dict.fromkeys(sorted(mad), reward)
        if output is not None and not self._settings.rollout.agent_madness_termination:
            try:
                verdict, _, _ = await self.verdict(workflow_task, output, turns)
            except NoVerdict:
                return JudgeOutput.per_agent(rewards, is_success=False)
            for turn in turns:
                if turn.trained and turn.agent not in mad:
                    own = verdict.rewards.get(turn.agent, verdict.rewards.get(turn.role))
                    rewards[turn.agent] = verdict.reward if own is None else own
        return JudgeOutput.per_agent(rewards, is_success=False)

    async def _ask(self, workflow_task: WorkflowTask, output: WorkflowOutput) -> tuple[JudgeOutput, int]:
        """The judge's verdict, and how many times it was asked again.

        :raises NoVerdict: it gave none, or there is no judge.
        """
        if self._judge is None:
            raise NoVerdict(no_reward(self._workflow_at))
        if self.by_group:
            raise NoVerdict(f"the judge {type(self._judge).__name__} is asked about whole groups, never one attempt")
        about, asked_again = f"judge {workflow_task.episode_id}", 0
        while True:
            try:
                return await ask_judge(self._judge, workflow_task, output, about, self._in_time), asked_again
            except JudgeFailed as e:
                if asked_again >= self._settings.rollout.max_retries:
                    raise NoVerdict(safe_text(e), asked_again=asked_again) from e
            asked_again += 1

    # ---------------------------------------------------------------- a group

    async def judged(self, episodes: Sequence[Episode]) -> list[Episode]:
        """The open episodes of one group, with their verdicts or without one for good.

        :raises astuner.contracts.errors.ConfigError: no judge could be asked, e.g. since a budget is spent.
        """
        about = f"judge {episodes[0].workflow_task.group_id}"
        attempts = tuple(
            Attempt(workflow_task=e.workflow_task, output=e.output or unfinished(e.turns, e.stop_reason), turns=e.turns)
            for e in episodes
        )
        answers: list[JudgeOutput | JudgeFailed] = []
        asked_again = 0
        while True:
            try:
                given = await ask_group_judge(self._judge, attempts, about, self._in_time)
            except JudgeFailed as e:
                given = [e] * len(attempts)
            if not answers or _failed(given) <= _failed(answers):  # one answer's verdicts: two may not compare
                answers = given
            if asked_again >= self._settings.rollout.max_retries or not _failed(answers):
                break
            asked_again += 1
        return [self._with(episode, answer, asked_again) for episode, answer in zip(episodes, answers, strict=True)]

    def _with(self, episode: Episode, answer: JudgeOutput | JudgeFailed, asked_again: int) -> Episode:
        episode = replace(episode, retries=episode.retries + asked_again)
        if isinstance(answer, JudgeFailed):
            why = safe_text(answer) + before_that(episode.stop_reason, episode.error)
            return episode.closed(StopReason.JUDGE_FAILED, why)
        try:
            verdict = self._for_everybody(answer, episode.turns, "judge")
        except NoVerdict as e:
            return episode.closed(e.reason, str(e))
        return replace(episode, verdict=verdict, reward_source="judge")

    # ---------------------------------------------------------------- of both

    async def _in_time(self, work: Coroutine[Any, Any, Any]) -> Any:
        timeout = self._settings.task_judge.judge_timeout
        try:
            return await self._limits.run(work, timeout)
        except OutOfTime as e:
            who = f"the judge {type(self._judge).__name__}"
            raise JudgeFailed(late(f"{who} gave no verdict within task_judge.judge_timeout = {timeout:g} s", e)) from e

    def _for_everybody(self, verdict: JudgeOutput, turns: Sequence[Turn], source: str) -> JudgeOutput:
        """The verdict, with the episode's reward as the mean over who is there: a name that nobody has moves nothing.

        :raises NoVerdict: an agent that trained has no reward (one that never got to speak may have one too).
        """
        if not (rewards := verdict.rewards):
            return verdict
        who, reason = "the judge", StopReason.JUDGE_FAILED
        if source == "workflow":
            at = f" ({self._workflow_at})" if self._workflow_at else ""
            who, reason = f"the workflow{at}", StopReason.WORKFLOW_FAILED
        for turn in turns:
            if turn.trained and turn.agent not in rewards and turn.role not in rewards:
                raise NoVerdict(
                    f"{who} returned rewards for {', '.join(rewards)}, and none for the agent {turn.agent!r} (role "
                    f"{turn.role!r}), which trains; add its name or role, or set train: false for it in astuner.agents",
                    reason=reason,
                )
        known = {*(self._settings.agents or (DEFAULT_AGENT,)), *(t.agent for t in turns), *(t.role for t in turns)}
        there = [reward for name, reward in rewards.items() if name in known]
        if not there:
            names, has = ", ".join(rewards), ", ".join(sorted(known))
            raise NoVerdict(f"{who} returned rewards for {names}; the episode has only {has}", reason=reason)
        return replace(verdict, reward=math.fsum(there) / len(there))


def _failed(answers: Sequence[JudgeOutput | JudgeFailed]) -> int:
    return sum(isinstance(answer, JudgeFailed) for answer in answers)


Wait = Callable[[Coroutine[Any, Any, Any]], Awaitable[Any]]


async def _as_it_is(work: Coroutine[Any, Any, Any]) -> Any:
    return await work


async def ask_judge(
    judge: Any, workflow_task: WorkflowTask, output: WorkflowOutput, about: str, wait: Wait = _as_it_is, who: str = ""
) -> JudgeOutput:
    """A judge's verdict on one attempt, checked.

    :param judge: what has ``judge``, or the seeds' ``compute_reward``.
    :param about: the name of its thread, for who looks at a process that stands still.
    :param wait: waits for its answer, such as under a time limit.
    :param who: what messages call it; its class by default.
    :raises JudgeFailed: whatever went wrong, said with the line in the judge's file.
    :raises ConfigError: as the judge raises it, since no other attempt would do better.
    """
    ask = judge.judge if hasattr(judge, "judge") else judge.compute_reward
    asked = call(ask, copy_attempt(workflow_task), output, name=about)
    return await _asked(asked, as_verdict, ask, wait, who or _named(judge))


async def ask_group_judge(
    judge: GroupJudge, attempts: Sequence[Attempt], about: str, wait: Wait = _as_it_is, who: str = ""
) -> list[JudgeOutput | JudgeFailed]:
    """Its verdict on each attempt of a group, or why there is none; parameters and errors as of `ask_judge`."""
    ask = judge.judge_group

    def read(answer: Any) -> list[JudgeOutput | JudgeFailed]:
        return as_verdicts(answer, len(attempts))

    own = tuple(replace(attempt, workflow_task=copy_attempt(attempt.workflow_task)) for attempt in attempts)
    return await _asked(call(ask, own, name=about), read, ask, wait, who or _named(judge))


def _named(judge: Any) -> str:
    return f"the judge {type(judge).__name__}"


async def _asked(work: Coroutine[Any, Any, Any], read: Callable[[Any], T], by: Any, wait: Wait, who: str) -> T:
    try:
        return contained()(checked)(read, await wait(work), by)
    except (JudgeFailed, ConfigError):  # a mistake in the config, or a budget that is spent: no other would do
        raise
    except Exception as e:
        raise JudgeFailed(story(who, e)) from e


async def call(function: Callable[..., Any], *args: Any, name: str) -> Any:
    """``async def`` on the loop, plain ``def`` in a thread of its own."""
    if inspect.iscoroutinefunction(function):
        return await function(*args)
    result = await in_daemon_thread(contained()(function), *args, name=name)
    return await result if inspect.isawaitable(result) else result
