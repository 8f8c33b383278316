"""From a workflow's output to a verdict: its own reward, or the judge's, which sees one attempt or a whole group.

A judge that fails is asked again about the same output: rolling out again for it would select what it can judge.
Where the judge compares attempts (`astuner.contracts.judge.GroupJudge`), one whose reward is open ends without a
verdict, though it ended in a way that is scored; when all of its group have ended, the judge is asked about those
together, once.

Invariants: there is a verdict for every agent that trained, or none at all; and what `Judging.judged` returns has a
verdict, or has ended as `StopReason.JUDGE_FAILED`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from astuner.contracts.errors import ConfigError, EpisodeAborted, JudgeFailed
from astuner.contracts.judge import Attempt, GroupJudge
from astuner.contracts.types import Episode, JudgeOutput, StopReason, Turn, WorkflowOutput, WorkflowTask
from astuner.rollout.endings import before_that, late, story, unfinished
from astuner.rollout.returned import as_verdict, as_verdicts, checked
from astuner.rollout.threads import OutOfTime, TimeLimits
from astuner.support.threads import in_daemon_thread

if TYPE_CHECKING:
    from astuner.config import Config

T = TypeVar("T")


class NoVerdict(Exception):
    """There is none for good; `reason` says whose failure that is."""

    def __init__(self, message: str, *, reason: StopReason = StopReason.JUDGE_FAILED, asked_again: int = 0) -> None:
        super().__init__(message)
        self.reason = reason
        self.asked_again = asked_again


def is_open(episode: Episode) -> bool:
    """Whether it waits for its group's verdicts."""
    return episode.verdict is None and episode.stop_reason.is_scored


def closed(episode: Episode, reason: StopReason, why: str) -> Episode:
    """An open episode that will have no verdict."""
    return replace(episode, stop_reason=reason, error=why)


class Judging:
    """Gives every scored attempt its verdict.

    :param judge: None where the workflow sets rewards.
    :param workflow_at: the file and line of the workflow, for messages.
    """

    def __init__(self, config: Config, judge: Any, limits: TimeLimits, workflow_at: str = "") -> None:
        self._workflow_at = f" ({workflow_at})" if workflow_at else ""
        self._settings = config.astuner
        self._judge = judge
        self._limits = limits
        self.by_group = isinstance(judge, GroupJudge)
        """Whether the judge is asked about whole groups."""

    def leaves_open(self, output: WorkflowOutput | None, reason: StopReason) -> bool:
        """Whether an attempt that ended so gets its verdict when the others of its group have ended too."""
        if not self.by_group or not reason.is_scored or reason is StopReason.CHECK_ABORTED or self._fixed(reason):
            return False
        return output is None or output.reward is None

    def wants_evaluation(self, output: WorkflowOutput | None, reason: StopReason) -> bool:
        """Whether the judge will be asked about an attempt that ended so, and wants its environment's evaluation."""
        if not getattr(self._judge, "wants_evaluation", False) or not reason.is_scored or self._fixed(reason):
            return False
        if output is not None and output.reward is not None:
            return False
        if reason is StopReason.CHECK_ABORTED:
            rollout = self._settings.rollout
            return output is not None and bool(self._settings.agents) and not rollout.agent_madness_termination
        return True

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
        if isinstance(output.reward, Mapping):
            verdict = JudgeOutput.per_agent(output.reward, is_success=output.is_success)
        elif output.reward is not None:
            verdict = JudgeOutput(reward=output.reward, is_success=output.is_success)
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
            raise NoVerdict(
                f"the workflow{self._workflow_at} returned no reward and no judge is configured; "
                "set astuner.task_judge.judge, or return WorkflowOutput(reward=…)"
            )
        if self.by_group:
            raise NoVerdict(f"the judge {type(self._judge).__name__} is asked about whole groups, never one attempt")
        # `compute_reward` is the seeds' older name
        ask = self._judge.judge if hasattr(self._judge, "judge") else self._judge.compute_reward
        asked_again = 0
        while True:
            try:
                about = f"judge {workflow_task.episode_id}"
                work = call(ask, workflow_task, output, name=about)
                return await self._in_time(work, as_verdict, by=ask), asked_again
            except JudgeFailed as e:
                if asked_again >= self._settings.rollout.max_retries:
                    raise NoVerdict(str(e), asked_again=asked_again) from e
            asked_again += 1

    # ---------------------------------------------------------------- a group

    async def judged(self, episodes: Sequence[Episode]) -> list[Episode]:
        """The open episodes of one group, with their verdicts or without one for good.

        :raises astuner.contracts.errors.ConfigError: no judge could be asked, e.g. since a budget is spent.
        """
        ask, group_id = self._judge.judge_group, episodes[0].workflow_task.group_id
        attempts = tuple(
            Attempt(workflow_task=e.workflow_task, output=e.output or unfinished(e.turns, e.stop_reason), turns=e.turns)
            for e in episodes
        )
        answers: list[JudgeOutput | JudgeFailed] = []
        asked_again = 0
        while True:
            try:
                work = call(ask, attempts, name=f"judge {group_id}")
                given = await self._in_time(work, lambda answer: as_verdicts(answer, len(attempts)), by=ask)
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
            why = str(answer) + before_that(episode.stop_reason, episode.error)
            return closed(episode, StopReason.JUDGE_FAILED, why)
        try:
            verdict = self._for_everybody(answer, episode.turns, "judge")
        except NoVerdict as e:
            return closed(episode, e.reason, str(e))
        return replace(episode, verdict=verdict, reward_source="judge")

    # ---------------------------------------------------------------- of both

    async def _in_time(self, work: Coroutine[Any, Any, Any], read: Callable[[Any], T], *, by: Any) -> T:
        """What the judge answers.

        :param work: the judge at work.
        :param read: checks its answer.
        :param by: the judge's method.
        :raises JudgeFailed: whatever went wrong.
        """
        timeout, name = self._settings.task_judge.judge_timeout, f"the judge {type(self._judge).__name__}"
        try:
            return checked(read, await self._limits.run(work, timeout), by)
        except (JudgeFailed, ConfigError):  # a mistake in the config, or a budget that is spent: no other would do
            raise
        except OutOfTime as e:
            raise JudgeFailed(late(f"{name} gave no verdict within task_judge.judge_timeout = {timeout:g} s", e)) from e
        except Exception as e:
            raise JudgeFailed(story(name, e)) from e

    def _for_everybody(self, verdict: JudgeOutput, turns: Sequence[Turn], source: str) -> JudgeOutput:
        """The verdict, with the episode's reward as the mean over who is there: a name that nobody has moves nothing.

        :raises NoVerdict: an agent that trained has no reward (one that never got to speak may have one too).
        """
        if not (rewards := verdict.rewards):
            return verdict
        who, reason = "the judge", StopReason.JUDGE_FAILED
        if source == "workflow":
            who, reason = f"the workflow{self._workflow_at}", StopReason.WORKFLOW_FAILED
        for turn in turns:
            if turn.trained and turn.agent not in rewards and turn.role not in rewards:
                raise NoVerdict(
                    f"{who} returned rewards for {', '.join(rewards)}, and none for the agent {turn.agent!r} (role "
                    f"{turn.role!r}), which trains; add its name or role, or set train: false for it in astuner.agents",
                    reason=reason,
                )
        known = {*self._settings.agents, *(t.agent for t in turns), *(t.role for t in turns)}
        there = [reward for name, reward in rewards.items() if name in known]
        return replace(verdict, reward=math.fsum(there) / len(there)) if there else verdict


def _failed(answers: Sequence[JudgeOutput | JudgeFailed]) -> int:
    return sum(isinstance(answer, JudgeFailed) for answer in answers)


async def call(function: Callable[..., Any], *args: Any, name: str) -> Any:
    """``async def`` on the loop, plain ``def`` in a thread of its own."""
    if inspect.iscoroutinefunction(function):
        return await function(*args)
    result = await in_daemon_thread(function, *args, name=name)
    return await result if inspect.isawaitable(result) else result
