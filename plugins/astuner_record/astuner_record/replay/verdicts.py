"""Judge recorded episodes exactly as the runner would.

The judge receives the workflow task and output from the log, in their JSON form. A reward that the workflow set is
removed, because otherwise no judge would be called. A judge that compares attempts receives the selected episodes of a
group.

Invariant: an episode gets either a verdict or a reason why it has none, never both.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from astuner import Config, Judging, NoVerdict, TimeLimits, build_judge, unfinished
from astuner.contracts.errors import ConfigError
from astuner.contracts.statistics import mean, percent
from astuner.contracts.types import Episode, JudgeOutput, StopReason, WorkflowOutput
from astuner_record.replay import short
from astuner_record.statistics import PairedTable, bootstrap_interval, cohens_kappa


@dataclass(frozen=True, kw_only=True)
class Rejudged:
    """One episode with its recorded and its new verdict."""

    episode: Episode
    """Episode as recorded."""
    verdict: JudgeOutput | None
    """New verdict. None: `why` gives the reason."""
    why: str = ""
    """Why there is no new verdict."""
    asked_again: int = 0
    """Retries after failures of the judge."""

    @property
    def judged(self) -> Episode | None:
        """Episode with the new verdict."""
        if self.verdict is None:
            return None
        return replace(self.episode, verdict=self.verdict, reward_source="judge")


class Rejudge:
    """Judge for recorded episodes."""

    def __init__(self, config: Config) -> None:
        """Create the judge.

        :param config: The run's settings. `task_judge.judge` selects the judge.
        :raises ConfigError: No judge is configured.
        """
        self.name = config.astuner.task_judge.judge or ""
        if not self.name:
            raise ConfigError(
                "The run has no judge because its workflow sets the rewards. Choose one with --judge NAME or "
                "--judge path/to/file.py->Class. To list installed judges, run: astuner plugins --hook judge"
            )
        self._judge: Any = build_judge(config)
        self._limit_decides = isinstance(config.astuner.rollout.truncated_reward, float)
        self._judging = Judging(config, self._judge, TimeLimits())

    async def ask(self, episodes: list[Episode]) -> list[Rejudged]:
        """Judge a group or a single episode, which is a group of one for a judge that compares attempts."""
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
        """Judge many episodes, up to ``max_parallel`` concurrently, reading each from the log when it is needed.

        For a judge that compares attempts, all episodes are read first, and up to ``max_parallel`` groups are judged
        concurrently.

        :returns: Results in the order of ``episodes``.
        """
        found: dict[int, Rejudged] = {}
        numbered = self._together(enumerate(episodes))

        async def worker() -> None:
            for numbers, group in numbered:  # the iterator is shared by all workers
                for number, one in zip(numbers, await self.ask(group), strict=True):
                    found[number] = one
                    on_verdict(one)

        await asyncio.gather(*(worker() for _ in range(max_parallel)))
        return [found[number] for number in sorted(found)]

    def _together(self, numbered: Iterator[tuple[int, Episode]]) -> Iterator[tuple[list[int], list[Episode]]]:
        """Yield batches for the judge, with the positions of their episodes in the log."""
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
        """Return why the runner would not judge an episode with this stop reason, or an empty string."""
        reason, output = episode.stop_reason, episode.output
        if reason is StopReason.CHECK_ABORTED:
            return "a check ended it, so its reward is rollout.agent_madness_reward for every judge"
        if reason.is_limit and self._limit_decides:
            return "a limit ended it, so its reward is rollout.truncated_reward for every judge"
        if reason is StopReason.JUDGE_FAILED:
            if output is None:
                return "its judge failed, and the log does not contain the stop reason before that"
        elif not reason.is_scored:
            return f"episodes that end with {reason.value} are never judged"
        wants = getattr(self._judge, "wants_evaluation", False)
        has_world = episode.workflow_task.task.has_environment
        if wants and has_world and (output is None or output.evaluation is None):
            return f"judge {self.name} needs the environment's evaluation, which is not in the recording"
        return ""


def _output(episode: Episode) -> WorkflowOutput:
    """Return the recorded output without a reward."""
    output = episode.output or unfinished(episode.turns, episode.stop_reason)
    return replace(output, reward=None, is_success=None)


def agreement(found: Sequence[Rejudged], *, seed: int = 0) -> dict[str, Any] | None:
    """Compare recorded verdicts (old) with new ones, over the episodes that have both. Return None if none has.

    ``difference`` is the mean over groups of new - old, because attempts at one task are not independent. Its 95 %
    interval is a bootstrap over groups. ``cohens_kappa`` is None if it is not defined.
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
    """Return a result as a JSON object for ``--json``."""
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
    """Format both verdicts of one episode."""
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
        lines.append(f"  the judge failed and was retried {one.asked_again} times")
    return "\n".join(lines)


def verdicts_text(
    found: Sequence[Rejudged], agreed: Mapping[str, Any] | None, judge: str, *, show: int
) -> Iterator[str]:
    """Yield the agreement of both verdicts over many episodes, and the episodes whose success changed.

    :param agreed: Return value of `agreement`.
    """
    judged = sum(one.verdict is not None for one in found)
    yield f"{judge}: {judged} of {len(found)} episodes judged"
    for why, n in Counter(one.why for one in found if one.verdict is None).most_common():
        yield f"  {n} not judged: {why}"
    if agreed is None:
        yield "No episode has both a recorded and a new verdict, so there is nothing to compare."
        return
    t, kappa = agreed["table"], agreed["cohens_kappa"]
    yield ""
    yield f"{'':<20}{'now success':>12}{'now failure':>13}"
    yield f"{'recorded success':<20}{t['both_success']:>12}{t['only_recorded']:>13}"
    yield f"{'recorded failure':<20}{t['only_now']:>12}{t['both_failure']:>13}"
    yield ""
    yield (
        f"agreement on success {percent(agreed['agreement'], 1)} of {agreed['episodes']} episodes; Cohen's kappa "
        f"{'not defined: both judges always give the same verdict' if kappa is None else f'{kappa:.3f}'}"
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
        yield f"{len(flipped)} episodes changed"
        for old, new in flipped[:show]:
            way = "failure → success" if new.is_success else "success → failure"
            yield f"  {old.workflow_task.episode_id}  {way}, reward {old.reward:.4g} → {new.reward:.4g}"
        if len(flipped) > show:
            yield f"  {len(flipped) - show} more: --show {len(flipped)}, or --json"


def _verdict(verdict: JudgeOutput | None, success: bool | None, source: str) -> str:
    if verdict is None:
        return f"no verdict ({source})"
    each = "".join(f", {name} {reward:.4g}" for name, reward in verdict.rewards.items())
    metrics = "".join(f", {name} {value:.4g}" for name, value in verdict.metrics.items())
    return f"reward {verdict.reward:.4g}{each}, {'success' if success else 'failure'} ({source}){metrics}"
