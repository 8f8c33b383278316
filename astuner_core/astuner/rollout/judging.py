"""From a workflow's output to a verdict: its own reward, or the judge's.

A judge that fails is asked again about the same output: rolling out again for it would select what it can judge.
Invariant: there is a verdict for every agent that trained, or none at all.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from astuner.contracts.errors import ConfigError, EpisodeAborted, JudgeFailed
from astuner.contracts.judge import GroupJudge
from astuner.contracts.types import JudgeOutput, StopReason, Turn, WorkflowOutput, WorkflowTask
from astuner.rollout.endings import late, story
from astuner.rollout.returned import as_verdict, checked
from astuner.rollout.threads import OutOfTime, TimeLimits, in_daemon_thread

if TYPE_CHECKING:
    from astuner.config import Config

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
        self._workflow_at = f" ({workflow_at})" if workflow_at else ""
        self._settings = config.astuner
        self._judge = judge
        self._limits = limits

    @property
    def by_group(self) -> bool:
        """Whether the judge is asked about whole groups (`astuner.rollout.group_judging`)."""
        return isinstance(self._judge, GroupJudge)

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
        return self.for_everybody(verdict, turns, source), source, asked_again

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
        ask = (
            self._judge.judge if hasattr(self._judge, "judge") else self._judge.compute_reward
        )  # the seeds' older name
        asked_again = 0
        while True:
            try:
                about = f"judge {workflow_task.episode_id}"
                work = call(ask, workflow_task, output, name=about)
                return await self.in_time(work, as_verdict, by=ask), asked_again
            except JudgeFailed as e:
                if asked_again >= self._settings.rollout.max_retries:
                    raise NoVerdict(str(e), asked_again=asked_again) from e
            asked_again += 1

    async def in_time(self, work: Coroutine[Any, Any, Any], read: Callable[[Any], T], *, by: Any) -> T:
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

    def for_everybody(self, verdict: JudgeOutput, turns: Sequence[Turn], source: str) -> JudgeOutput:
        """The verdict, with the episode's reward as the mean over who is there.

        :raises NoVerdict: an agent that trained has no reward (one that never got to speak may have one too).
        """
        self._check_everybody(verdict, turns, source)
        return self._of_those_there(verdict, turns)

    def _check_everybody(self, verdict: JudgeOutput, turns: Sequence[Turn], source: str) -> None:
        """Whether every agent that trained has a reward.

        :raises NoVerdict: not so.
        """
        rewards, who = verdict.rewards, "the workflow" if source == "workflow" else "the judge"
        reason = StopReason.WORKFLOW_FAILED if source == "workflow" else StopReason.JUDGE_FAILED
        if not rewards:
            return
        for turn in turns:
            if turn.trained and turn.agent not in rewards and turn.role not in rewards:
                raise NoVerdict(
                    f"{who} returned rewards for {', '.join(rewards)}, and none for the agent {turn.agent!r} (role "
                    f"{turn.role!r}), which trains; add its name or role, or set train: false for it in astuner.agents",
                    reason=reason,
                )

    def _of_those_there(self, verdict: JudgeOutput, turns: Sequence[Turn]) -> JudgeOutput:
        """The verdict with the episode's reward as the mean over who is there: a name that nobody has moves nothing."""
        known = {*self._settings.agents, *(t.agent for t in turns), *(t.role for t in turns)}
        there = [reward for name, reward in verdict.rewards.items() if name in known]
        return replace(verdict, reward=math.fsum(there) / len(there)) if there else verdict


async def call(function: Callable[..., Any], *args: Any, name: str) -> Any:
    """``async def`` on the loop, plain ``def`` in a thread of its own."""
    if inspect.iscoroutinefunction(function):
        return await function(*args)
    result = await in_daemon_thread(function, *args, name=name)
    return await result if inspect.isawaitable(result) else result
