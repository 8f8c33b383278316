"""From a group's outputs to their verdicts, where the judge compares attempts (`astuner.contracts.judge.GroupJudge`).

An attempt whose reward is open ends without a verdict, though it ended in a way that is scored; when all of its group
have ended, the judge is asked about those together, once.  Invariant: what comes out has a verdict, or has ended as
`StopReason.JUDGE_FAILED` or `StopReason.CANCELLED`; nothing stays open.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from astuner.contracts.errors import JudgeFailed
from astuner.contracts.judge import Attempt, GroupJudge
from astuner.contracts.types import Episode, JudgeOutput, StopReason
from astuner.rollout.endings import before_that, unfinished
from astuner.rollout.judging import Judging, NoVerdict, call
from astuner.rollout.returned import as_verdicts


def is_open(episode: Episode) -> bool:
    """Whether it waits for its group's verdicts."""
    return episode.verdict is None and episode.stop_reason.is_scored


def closed(episode: Episode, reason: StopReason, why: str) -> Episode:
    """An open episode that will have no verdict."""
    return replace(episode, stop_reason=reason, error=why)


class GroupJudging:
    """Asks a group judge."""

    def __init__(self, judge: GroupJudge, judging: Judging, *, max_retries: int) -> None:
        """:param max_retries: how often it is asked again about the same attempts."""
        self._judge = judge
        self._judging = judging
        self._max_retries = max_retries

    async def judged(self, episodes: Sequence[Episode]) -> list[Episode]:
        """The open episodes of one group, with their verdicts or without one for good."""
        attempts = tuple(_attempt(episode) for episode in episodes)
        answers: list[JudgeOutput | JudgeFailed] = []
        asked_again = 0
        while True:
            try:
                given = await self._ask(attempts)
            except JudgeFailed as e:
                given = [e] * len(attempts)
            if not answers or _failed(given) <= _failed(answers):  # one answer's verdicts: two may not compare
                answers = given
            if asked_again >= self._max_retries or not _failed(answers):
                break
            asked_again += 1
        return [self._with(episode, answer, asked_again) for episode, answer in zip(episodes, answers, strict=True)]

    async def _ask(self, attempts: Sequence[Attempt]) -> list[JudgeOutput | JudgeFailed]:
        """:raises JudgeFailed: whatever went wrong."""

        def read(answer: Any) -> list[JudgeOutput | JudgeFailed]:
            return as_verdicts(answer, len(attempts))

        about = f"judge {attempts[0].workflow_task.group_id}"
        judge = self._judge.judge_group
        return await self._judging.in_time(call(judge, attempts, name=about), read, by=judge)

    def _with(self, episode: Episode, answer: JudgeOutput | JudgeFailed, asked_again: int) -> Episode:
        episode = replace(episode, retries=episode.retries + asked_again)
        if isinstance(answer, JudgeFailed):
            why = str(answer) + before_that(episode.stop_reason, episode.error)
            return closed(episode, StopReason.JUDGE_FAILED, why)
        try:
            verdict = self._judging.for_everybody(answer, episode.turns, "judge")
        except NoVerdict as e:
            return closed(episode, e.reason, str(e))
        return replace(episode, verdict=verdict, reward_source="judge")


def _failed(answers: Sequence[JudgeOutput | JudgeFailed]) -> int:
    return sum(isinstance(answer, JudgeFailed) for answer in answers)


def _attempt(episode: Episode) -> Attempt:
    return Attempt(
        workflow_task=episode.workflow_task,
        output=episode.output or unfinished(episode.turns, episode.stop_reason),
        turns=episode.turns,
    )
