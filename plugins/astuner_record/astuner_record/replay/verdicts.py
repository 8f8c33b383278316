"""Asks a judge about recorded episodes, exactly as the runner would have.

The judge gets the workflow task and the workflow's output as the log has them, which is as JSON holds them; a reward
that the workflow set itself is taken out, or no judge would be asked.  One that compares attempts is asked about those
of a group which were chosen.  Invariant: an episode gets a verdict or a reason why there is none, and never both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from astuner import Config
from astuner.contracts.errors import ConfigError
from astuner.contracts.types import Episode, JudgeOutput, StopReason, WorkflowOutput
from astuner.rollout.endings import unfinished
from astuner.rollout.judging import Judging, NoVerdict
from astuner.rollout.metrics import mean
from astuner.rollout.parts import build_judge
from astuner.rollout.threads import TimeLimits
from astuner.rollout.world import NO_ENVIRONMENT
from astuner_record.statistics import Interval, PairedTable, bootstrap_interval, cohens_kappa


@dataclass(frozen=True, kw_only=True)
class Rejudged:
    """One episode with its recorded verdict and the new one."""

    episode: Episode
    """As recorded."""
    verdict: JudgeOutput | None
    """None: see `why`."""
    why: str = ""
    """Why there is no new verdict."""
    asked_again: int = 0
    """How many times the judge was asked again, since it failed."""

    @property
    def judged(self) -> Episode | None:
        """The episode as it would be with the new verdict."""
        if self.verdict is None:
            return None
        return replace(self.episode, verdict=self.verdict, reward_source="judge")


class Rejudge:
    """A judge, ready to be asked about recorded episodes."""

    def __init__(self, config: Config) -> None:
        """
        :param config: the run's settings; `task_judge.judge` is the judge to ask.
        :raises ConfigError: there is no judge.
        """
        self.name = config.astuner.task_judge.judge or ""
        if not self.name:
            raise ConfigError(
                "the run has no judge, since its workflow sets the rewards; say which to ask: --judge NAME, or "
                "--judge path/to/file.py->Class (`astuner plugins --hook judge` lists those that are installed)"
            )
        self._judge: Any = build_judge(config)
        self._limit_decides = isinstance(config.astuner.rollout.truncated_reward, float)
        self._judging = Judging(config, self._judge, TimeLimits())

    async def ask(self, episode: Episode) -> Rejudged:
        """Ask about one episode, which is a group of one for a judge that compares them."""
        if self._judging.by_group:
            (found,) = await self._ask_group([episode])
            return found
        if why := self._impossible(episode):
            return Rejudged(episode=episode, verdict=None, why=why)
        asked = _output(episode)
        try:
            verdict, _, again = await self._judging.verdict(episode.workflow_task, asked, episode.turns)
        except NoVerdict as e:
            return Rejudged(episode=episode, verdict=None, why=str(e), asked_again=e.asked_again)
        return Rejudged(episode=episode, verdict=verdict, asked_again=again)

    async def ask_all(
        self, episodes: Iterator[Episode], *, max_parallel: int, on_verdict: Callable[[Rejudged], None]
    ) -> list[Rejudged]:
        """Ask about many, ``max_parallel`` at once, each read from the log when its turn comes.

        A judge that compares them is asked about ``max_parallel`` groups at once, and all are read first.

        :returns: in the order of ``episodes``.
        """
        found: dict[int, Rejudged] = {}
        numbered = self._together(enumerate(episodes))

        async def worker() -> None:
            for numbers, group in numbered:  # shared: every worker takes the next one
                one_each = [await self.ask(group[0])] if not self._judging.by_group else await self._ask_group(group)
                for number, one in zip(numbers, one_each, strict=True):
                    found[number] = one
                    on_verdict(one)

        await asyncio.gather(*(worker() for _ in range(max_parallel)))
        return [found[number] for number in sorted(found)]

    def _together(self, numbered: Iterator[tuple[int, Episode]]) -> Iterator[tuple[list[int], list[Episode]]]:
        """What the judge is asked about at once, with the places in the log."""
        if not self._judging.by_group:
            yield from (([number], [episode]) for number, episode in numbered)
            return
        groups: dict[str, tuple[list[int], list[Episode]]] = {}
        for number, episode in numbered:
            numbers, group = groups.setdefault(episode.workflow_task.group_id, ([], []))
            numbers.append(number)
            group.append(episode)
        yield from groups.values()

    async def _ask_group(self, episodes: list[Episode]) -> list[Rejudged]:
        whys = [self._impossible(episode) for episode in episodes]
        possible = [episode for episode, why in zip(episodes, whys, strict=True) if not why]
        again = [replace(e, output=_output(e), verdict=None, reward_source="", retries=0) for e in possible]
        judged = iter(await self._judging.judged(again)) if again else iter(())
        found = []
        for episode, why in zip(episodes, whys, strict=True):
            new = None if why else next(judged)
            verdict, asked_again = (None, 0) if new is None else (new.verdict, new.retries)
            why = why or (new.error if new is not None and verdict is None else "")
            found.append(Rejudged(episode=episode, verdict=verdict, why=why, asked_again=asked_again))
        return found

    def _impossible(self, episode: Episode) -> str:
        """Why the runner would not ask a judge about an episode that ended so; empty if it would."""
        reason, output = episode.stop_reason, episode.output
        if reason is StopReason.CHECK_ABORTED:
            return "a check ended it, so its reward is rollout.agent_madness_reward, whoever judges"
        if reason.is_limit and self._limit_decides:
            return "a limit ended it, so its reward is rollout.truncated_reward, whoever judges"
        if reason is StopReason.JUDGE_FAILED:
            if output is None:
                return "its judge failed, and the log no longer says how it had ended before"
        elif not reason.is_scored:
            return f"it ended as {reason.value}, which is never judged"
        wants = getattr(self._judge, "wants_evaluation", False)
        has_world = episode.workflow_task.task.env_type not in NO_ENVIRONMENT
        if wants and has_world and (output is None or output.evaluation is None):
            return f"the judge {self.name} goes by the environment's evaluation, which was not asked for then"
        return ""


def _output(episode: Episode) -> WorkflowOutput:
    """What the judge gets, with the reward open."""
    output = episode.output or unfinished(episode.turns, episode.stop_reason)
    return replace(output, reward=None, is_success=None)


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Recorded (old) against new verdicts, over the episodes that have both."""

    episodes: int
    groups: int
    table: PairedTable
    """Of success; old is a, new is b."""
    kappa: float | None
    """Cohen's; None where it says nothing."""
    reward_old: float
    reward_new: float
    difference: float
    """Mean over groups of new - old: the attempts at one task are not independent of each other."""
    interval: Interval
    """95 %, of the difference; bootstrap over groups."""


def agreement(found: Sequence[Rejudged], *, seed: int = 0) -> Agreement | None:
    """None: no episode has both verdicts."""
    both = [(one.episode, judged) for one in found if (judged := one.judged) and one.episode.verdict is not None]
    if not both:
        return None
    groups: dict[str, list[float]] = {}
    for old, new in both:
        groups.setdefault(old.workflow_task.group_id, []).append(_reward(new.reward) - _reward(old.reward))
    differences = [mean(of_group) for of_group in groups.values()]
    table = PairedTable.of([(bool(old.is_success), bool(new.is_success)) for old, new in both])
    return Agreement(
        episodes=len(both),
        groups=len(groups),
        table=table,
        kappa=cohens_kappa(table),
        reward_old=mean([_reward(old.reward) for old, _ in both]),
        reward_new=mean([_reward(new.reward) for _, new in both]),
        difference=mean(differences),
        interval=bootstrap_interval(differences, seed=seed),
    )


def _reward(reward: float | None) -> float:
    assert reward is not None  # both have verdicts
    return reward
