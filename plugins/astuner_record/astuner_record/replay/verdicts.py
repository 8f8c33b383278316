"""Asks a judge about recorded episodes, exactly as the runner would have.

The judge gets the workflow task and the workflow's output as the log has them, which is as JSON holds them; a reward
that the workflow set itself is taken out, or no judge would be asked.  One that compares attempts is asked about those
of a group which were chosen.  Invariant: an episode gets a verdict or a reason why there is none, and never both.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from astuner import Config, Judging, NoVerdict, TimeLimits, build_judge, unfinished
from astuner.contracts.errors import ConfigError
from astuner.contracts.statistics import mean
from astuner.contracts.types import Episode, JudgeOutput, StopReason, WorkflowOutput
from astuner_record.replay import short
from astuner_record.statistics import PairedTable, bootstrap_interval, cohens_kappa


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

    async def ask(self, episodes: list[Episode]) -> list[Rejudged]:
        """Ask about a group, or one episode: that is a group of one for a judge that compares them."""
        if self._judging.by_group:
            return await self._ask_group(episodes)
        return [await self._ask_alone(episode) for episode in episodes]

    async def _ask_alone(self, episode: Episode) -> Rejudged:
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
                for number, one in zip(numbers, await self.ask(group), strict=True):
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
        has_world = episode.workflow_task.task.has_environment
        if wants and has_world and (output is None or output.evaluation is None):
            return f"the judge {self.name} goes by the environment's evaluation, which was not asked for then"
        return ""


def _output(episode: Episode) -> WorkflowOutput:
    """What the judge gets, with the reward open."""
    output = episode.output or unfinished(episode.turns, episode.stop_reason)
    return replace(output, reward=None, is_success=None)


def agreement(found: Sequence[Rejudged], *, seed: int = 0) -> dict[str, Any] | None:
    """Recorded verdicts (old) against new ones, over the episodes that have both, for ``--json``; None: none has.

    ``difference`` is the mean over groups of new - old, since the attempts at one task are not independent of each
    other, and its 95 % interval a bootstrap over groups; ``cohens_kappa`` is None where it says nothing.
    """
    both = [(one.episode, judged) for one in found if (judged := one.judged) and one.episode.verdict is not None]
    if not both:
        return None
    groups: dict[str, list[float]] = {}
    for old, new in both:
        groups.setdefault(old.workflow_task.group_id, []).append(_reward(new) - _reward(old))
    differences = [mean(of_group) for of_group in groups.values()]
    table = PairedTable.of([(bool(old.is_success), bool(new.is_success)) for old, new in both])
    interval = bootstrap_interval(differences, seed=seed)
    return {
        "episodes": len(both),
        "groups": len(groups),
        "table": {
            "both_success": table.both,
            "only_recorded": table.only_a,
            "only_now": table.only_b,
            "both_failure": table.neither,
        },
        "agreement": table.agreement,
        "cohens_kappa": cohens_kappa(table),
        "reward_recorded": mean([_reward(old) for old, _ in both]),
        "reward_now": mean([_reward(new) for _, new in both]),
        "difference": mean(differences),
        "ci_low": interval.low,
        "ci_high": interval.high,
    }


def _reward(episode: Episode) -> float:
    assert episode.reward is not None  # it has a verdict
    return episode.reward


def rejudged_row(one: Rejudged) -> dict[str, Any]:
    """For ``--json``."""
    episode, new = one.episode, one.judged
    return {
        "episode_id": episode.workflow_task.episode_id,
        "task_id": episode.workflow_task.task.task_id,
        "recorded": {
            "reward": episode.reward,
            "rewards": dict(episode.verdict.rewards) if episode.verdict else {},
            "is_success": episode.is_success,
            "source": episode.reward_source,
            "stop_reason": episode.stop_reason.value,
        },
        "now": None
        if new is None
        else {
            "reward": new.reward,
            "rewards": dict(one.verdict.rewards) if one.verdict else {},
            "is_success": new.is_success,
            "metrics": dict(one.verdict.metrics) if one.verdict else {},
        },
        "why": one.why,
        "asked_again": one.asked_again,
    }


def verdict_text(one: Rejudged, judge: str) -> str:
    """Both verdicts of one episode."""
    episode = one.episode
    source = episode.reward_source or episode.stop_reason.value
    lines = [
        f"episode {episode.workflow_task.episode_id}: {short(episode.workflow_task.task.main_query)}",
        f"  recorded  {_verdict(episode.verdict, episode.is_success, source)}",
    ]
    if one.judged is None:
        lines.append(f"  {judge}  no verdict: {one.why}")
    else:
        lines.append(f"  now       {_verdict(one.verdict, one.judged.is_success, judge)}")
    if one.asked_again:
        lines.append(f"  the judge failed and was asked again {one.asked_again} times")
    return "\n".join(lines)


def verdicts_text(
    found: Sequence[Rejudged], agreed: Mapping[str, Any] | None, judge: str, *, show: int
) -> Iterator[str]:
    """Many episodes with both verdicts: how they agree, and those that flipped.

    :param agreed: of `agreement`.
    """
    judged = sum(one.verdict is not None for one in found)
    yield f"{judge}: {judged} of {len(found)} episodes judged"
    for why, n in Counter(one.why for one in found if one.verdict is None).most_common():
        yield f"  {n} not: {why}"
    if agreed is None:
        yield "no episode has a recorded verdict and a new one, so there is nothing to compare"
        return
    t, kappa = agreed["table"], agreed["cohens_kappa"]
    yield ""
    yield f"{'':<20}{'now success':>12}{'now failure':>13}"
    yield f"{'recorded success':<20}{t['both_success']:>12}{t['only_recorded']:>13}"
    yield f"{'recorded failure':<20}{t['only_now']:>12}{t['both_failure']:>13}"
    yield ""
    yield (
        f"agreement on success {agreed['agreement']:.1%} of {agreed['episodes']} episodes; Cohen's kappa "
        f"{'not defined: both always say the same' if kappa is None else f'{kappa:.3f}'}"
    )
    yield (
        f"reward {agreed['reward_recorded']:.4g} recorded, {agreed['reward_now']:.4g} now; difference "
        f"{agreed['difference']:+.4g}, 95 % [{agreed['ci_low']:+.4g}, {agreed['ci_high']:+.4g}] (bootstrap over "
        f"{agreed['groups']} groups)"
    )
    both = [(one.episode, new) for one in found if (new := one.judged)]
    flipped = [(old, new) for old, new in both if old.is_success not in (None, new.is_success)]
    if flipped:
        yield ""
        yield f"{len(flipped)} episodes flipped"
        for old, new in flipped[:show]:
            way = "failure → success" if new.is_success else "success → failure"
            yield f"  {old.workflow_task.episode_id}  {way}, reward {old.reward:.4g} → {new.reward:.4g}"
        if len(flipped) > show:
            yield f"  and {len(flipped) - show} more: --show {len(flipped)}, or --json"


def _verdict(verdict: JudgeOutput | None, success: bool | None, source: str) -> str:
    if verdict is None:
        return f"no verdict ({source})"
    each = "".join(f", {name} {reward:.4g}" for name, reward in verdict.rewards.items())
    metrics = "".join(f", {name} {value:.4g}" for name, value in verdict.metrics.items())
    return f"reward {verdict.reward:.4g}{each}, {'success' if success else 'failure'} ({source}){metrics}"
