"""Get the verdict on an episode: the workflow's own reward, or a judge's, which sees one attempt or a complete group.

If a judge fails, it is called again for the same output. Repeating the rollout instead would favor outputs that the
judge can handle. With a judge that compares attempts (`astuner.contracts.judge.GroupJudge`), attempts without a reward
end without a verdict. When all attempts of the group have ended, the judge is called once for all of them.

Invariants: there is a verdict for every trained agent, or none at all. Each result of `Judging.judged` has a verdict or
the stop reason `StopReason.JUDGE_FAILED`. Values from workflows and judges are validated once, here; later code relies
on it.
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


_OUTPUT_FIELDS = {"reward", "response", "is_success"}
"""Keys of a returned dict that is meant as a `WorkflowOutput`, not as rewards per agent."""
LONGEST_VALUE = 200
"""Maximum characters of an invalid value in a message."""


def as_output(returned: Any) -> WorkflowOutput:
    """Convert a workflow's result.

    :param returned: A `WorkflowOutput`, agentscope.tuner's equivalent, a reward, rewards per agent, or the response for
        the judge as text.
    """
    if isinstance(returned, WorkflowOutput):
        output = returned
    elif isinstance(returned, str):
        output = WorkflowOutput(response=returned)
    elif isinstance(returned, Mapping) and returned.keys() & _OUTPUT_FIELDS:
        fields = ", ".join(f"{name}=…" for name in returned)
        raise Misbehaved(f"returned {_brief(returned)}; return WorkflowOutput({fields}) instead of a dict")
    elif isinstance(returned, Mapping) or as_float(returned) is not None:
        output = WorkflowOutput(reward=returned)
    elif hasattr(returned, "reward") and hasattr(returned, "response") and not isinstance(returned, type):
        metrics = getattr(returned, "metrics", None) or {}
        output = WorkflowOutput(reward=returned.reward, response=returned.response, metrics=metrics)
    else:
        accepted = f"a WorkflowOutput, {A_REWARD}, or the response as text"
        raise Misbehaved(f"returned {_brief(returned)}; it must return {accepted}{_hint(returned)}")
    if _is_running(output.response):
        raise Misbehaved(f"returned the response {_brief(output.response)}; add await before the call")
    if not isinstance(output.evaluation, (Evaluation, type(None))):
        raise Misbehaved(f"returned the evaluation {_brief(output.evaluation)}; it must be an Evaluation or None")
    reward = None if output.reward is None else _as_reward(output.reward, ", or None to ask the judge")
    success = _as_success(output.is_success)
    return replace(output, reward=reward, is_success=success, metrics=_as_metrics(output.metrics))


def checked(read: Callable[[Any], T], answer: Any, by: Any) -> T:
    """Return ``read(answer)``. If it is rejected, add the place of the code that returned the answer.

    :raises Misbehaved: The answer is invalid.
    """
    try:
        return read(answer)
    except Misbehaved as e:
        code = _code_of(by)
        at = written_at(code)
        raise Misbehaved(f"{e} ({at} in {code.__name__})" if at else str(e)) from None


def _code_of(asked: Any) -> Any:
    """Return the function or class of a callable, without `functools.partial` and ``__call__``."""
    while isinstance(asked, functools.partial):
        asked = asked.func
    return asked if hasattr(asked, "__name__") else type(asked)


def as_verdict(answer: Any) -> JudgeOutput:
    """Convert a judge's result: a `JudgeOutput` or similar object, a reward, a bool, or a pair as in the seeds."""
    if isinstance(answer, JudgeOutput):
        said = _verdict(answer.rewards or answer.reward, answer.is_success, _as_metrics(answer.metrics))
        return replace(said, reward=answer.reward)
    if isinstance(answer, tuple) and len(answer) == 2:
        return _verdict(answer[0], answer[1], {})
    if as_float(answer) is not None:
        return _verdict(answer, as_bool(answer), {})
    if hasattr(answer, "reward"):
        return _verdict(answer.reward, None, _as_metrics(getattr(answer, "metrics", None) or {}))
    raise Misbehaved(f"returned {_brief(answer)}; it must return a JudgeOutput or {A_REWARD}{_hint(answer)}")


def as_verdicts(answer: Any, wanted: int) -> list[JudgeOutput | JudgeFailed]:
    """Convert a group judge's result for ``wanted`` attempts."""
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
    """Return the validated reward or rewards per agent.

    :param otherwise: Other accepted values, for the message.
    """
    if not isinstance(reward, Mapping):
        if (number := as_reward(reward)) is None:
            raise Misbehaved(f"returned the reward {_brief(reward)}; it must be {A_REWARD}{otherwise}")
        return number
    if not reward:
        raise Misbehaved("returned an empty mapping of rewards; it must name every trained agent or role")
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
        raise Misbehaved(f"returned an invalid verdict: {e}") from None


def _as_metrics(metrics: Any) -> dict[str, float]:
    """Return the metrics as floats. An invalid number would corrupt the average of the step."""
    if not isinstance(metrics, Mapping):
        raise Misbehaved(f"returned the metrics {_brief(metrics)}; they must be a mapping of names to finite numbers")
    found = {}
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise Misbehaved(f"returned a metric called {_brief(name)}; its name must be a string")
        if (number := as_float(value)) is None:
            said = f"{name} = {_brief(value)}"
            raise Misbehaved(f"returned the metric {said}; it must be a finite number, or be omitted")
        found[name] = number
    return found


def _brief(value: Any) -> str:
    """Return an invalid value for a message, shortened to one line."""
    text = " ".join(shown(value).split())
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}… ({type(value).__name__})"


def _hint(value: Any) -> str:
    """Return the change that a common mistake in user code needs, as the end of a message."""
    if value is None:
        return ". Add the missing return"
    if inspect.isgenerator(value) or inspect.isasyncgen(value):
        return ". Use return instead of yield"
    if isinstance(message := getattr(value, "message", None), Mapping) and "content" in message:
        return '. To return the text of a reply, use reply.message["content"]'
    return ""


def _is_running(value: Any) -> bool:
    """Return whether ``value`` is a coroutine or future that user code did not await."""
    return inspect.isawaitable(value) or inspect.isasyncgen(value)


T = TypeVar("T")


class NoVerdict(Exception):
    """There is no verdict; `reason` is the stop reason."""

    def __init__(self, message: str, *, reason: StopReason = StopReason.JUDGE_FAILED, asked_again: int = 0) -> None:
        super().__init__(message)
        self.reason = reason
        self.asked_again = asked_again


class Judging:
    """Gives every scored attempt its verdict.

    :param judge: None if the workflow returns rewards.
    :param workflow_at: File and line of the workflow, for messages.
    """

    def __init__(self, config: Config, judge: Any, limits: TimeLimits, workflow_at: str = "") -> None:
        self._workflow_at = workflow_at
        self._settings = config.astuner
        self._judge = judge
        self._limits = limits
        self.by_group = isinstance(judge, GroupJudge)
        """Whether the judge evaluates complete groups."""

    def leaves_open(self, output: WorkflowOutput | None, reason: StopReason) -> bool:
        """Return whether the attempt gets its verdict only after its complete group has ended."""
        return self.by_group and reason is not StopReason.CHECK_ABORTED and self._asks(output, reason)

    def wants_evaluation(self, output: WorkflowOutput | None, reason: StopReason) -> bool:
        """Return whether the judge will be called for this attempt and needs the environment's evaluation."""
        if not getattr(self._judge, "wants_evaluation", False) or not self._asks(output, reason):
            return False
        if reason is StopReason.CHECK_ABORTED:
            rollout = self._settings.rollout
            return output is not None and bool(self._settings.agents) and not rollout.agent_madness_termination
        return True

    def _asks(self, output: WorkflowOutput | None, reason: StopReason) -> bool:
        """Return whether the attempt is scored and neither the workflow nor the config sets its reward."""
        return reason.is_scored and not self._fixed(reason) and (output is None or output.reward is None)

    def _fixed(self, reason: StopReason) -> JudgeOutput | None:
        """Return the verdict on the attempt if `rollout.truncated_reward` is a number."""
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
        """Return the verdict, its source, and the number of repeated calls of the judge.

        :raises NoVerdict: There is no verdict.
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
        """Return the verdict on an attempt in which an output check fired.

        If agents are named, only agents that fired a check are punished. The others keep their own rewards if the
        episode continued, and have none if it did not.
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
        """Return the judge's verdict and the number of repeated calls.

        :raises NoVerdict: The judge failed, or there is no judge.
        """
        if self._judge is None:
            raise NoVerdict(no_reward(self._workflow_at))
        if self.by_group:
            raise NoVerdict(f"the judge {type(self._judge).__name__} judges complete groups, not single attempts")
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
        """Return the open episodes of one group with their verdicts, or as failed.

        :raises astuner.contracts.errors.ConfigError: The judge cannot be called, for example because a budget is spent.
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
            if not answers or _failed(given) <= _failed(answers):  # verdicts of one call: two may not be comparable
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
            raise JudgeFailed(
                late(f"{who} returned no verdict within task_judge.judge_timeout = {timeout:g} s", e)
            ) from e

    def _for_everybody(self, verdict: JudgeOutput, turns: Sequence[Turn], source: str) -> JudgeOutput:
        """Return the verdict with the episode's reward: the mean over existing agents. Unknown names are ignored.

        :raises NoVerdict: A trained agent has no reward. (An agent that never acted may have one.)
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
                    f"{who} returned rewards for {', '.join(rewards)}, but none for the trained agent {turn.agent!r} "
                    f"(role {turn.role!r}). Add its name or role, or set train: false for it in astuner.agents",
                    reason=reason,
                )
        known = {*(self._settings.agents or (DEFAULT_AGENT,)), *(t.agent for t in turns), *(t.role for t in turns)}
        there = [reward for name, reward in rewards.items() if name in known]
        if not there:
            names, has = ", ".join(rewards), ", ".join(sorted(known))
            raise NoVerdict(f"{who} returned rewards for {names}; the episode only has {has}", reason=reason)
        return replace(verdict, reward=math.fsum(there) / len(there))


def _failed(answers: Sequence[JudgeOutput | JudgeFailed]) -> int:
    return sum(isinstance(answer, JudgeFailed) for answer in answers)


Wait = Callable[[Coroutine[Any, Any, Any]], Awaitable[Any]]


async def _as_it_is(work: Coroutine[Any, Any, Any]) -> Any:
    return await work


async def ask_judge(
    judge: Any, workflow_task: WorkflowTask, output: WorkflowOutput, about: str, wait: Wait = _as_it_is, who: str = ""
) -> JudgeOutput:
    """Return a judge's validated verdict on one attempt.

    :param judge: Object with ``judge``, or with ``compute_reward`` as in the seeds.
    :param about: Name of its thread, visible when inspecting a process that hangs.
    :param wait: Awaits its answer, for example with a time limit.
    :param who: Its name in messages; its class by default.
    :raises JudgeFailed: The judge failed; the message has the line in its file.
    :raises ConfigError: Raised by the judge; no other attempt would succeed.
    """
    ask = judge.judge if hasattr(judge, "judge") else judge.compute_reward
    asked = call(ask, copy_attempt(workflow_task), output, name=about)
    return await _asked(asked, as_verdict, ask, wait, who or _named(judge))


async def ask_group_judge(
    judge: GroupJudge, attempts: Sequence[Attempt], about: str, wait: Wait = _as_it_is, who: str = ""
) -> list[JudgeOutput | JudgeFailed]:
    """Return a verdict or an error for each attempt of a group; parameters and errors as in `ask_judge`."""
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
    except (JudgeFailed, ConfigError):  # a mistake in the config, or a spent budget: retrying does not help
        raise
    except Exception as e:
        raise JudgeFailed(story(who, e)) from e


async def call(function: Callable[..., Any], *args: Any, name: str) -> Any:
    """Call a function: ``async def`` on the event loop, plain ``def`` in a new thread."""
    if inspect.iscoroutinefunction(function):
        return await function(*args)
    result = await in_daemon_thread(contained()(function), *args, name=name)
    return await result if inspect.isawaitable(result) else result
