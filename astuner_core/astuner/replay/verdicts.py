"""Asks a judge about recorded episodes, exactly as the runner would have.

The judge gets the workflow task and the workflow's output as the log has them, which is as JSON holds them; a reward
that the workflow set itself is taken out, or no judge would be asked.  Invariant: an episode gets a verdict or a reason
why there is none, and never both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from astuner.config import Config
from astuner.errors import ConfigError
from astuner.rollout.endings import unfinished
from astuner.rollout.judging import Judging, NoVerdict
from astuner.rollout.parts import build_judge
from astuner.rollout.threads import TimeLimits
from astuner.rollout.world import NO_ENVIRONMENT
from astuner.types import Episode, JudgeOutput, StopReason


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

    def __init__(self, config: Config, disabled_plugins: tuple[str, ...] = ()) -> None:
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
        self._judge: Any = build_judge(config, disabled_plugins)
        self._judging = Judging(config, self._judge, TimeLimits())

    async def ask(self, episode: Episode) -> Rejudged:
        """Ask about one episode."""
        if why := self._impossible(episode):
            return Rejudged(episode=episode, verdict=None, why=why)
        output = episode.output or unfinished(episode.turns, episode.stop_reason)
        asked = replace(output, reward=None, is_success=None)
        try:
            verdict, _, again = await self._judging.verdict(episode.workflow_task, asked, episode.turns)
        except NoVerdict as e:
            return Rejudged(episode=episode, verdict=None, why=str(e), asked_again=e.asked_again)
        return Rejudged(episode=episode, verdict=verdict, asked_again=again)

    async def ask_all(
        self, episodes: Iterator[Episode], *, max_parallel: int, on_verdict: Callable[[Rejudged], None]
    ) -> list[Rejudged]:
        """Ask about many, ``max_parallel`` at once, each read from the log when its turn comes.

        :returns: in the order of ``episodes``.
        """
        found: dict[int, Rejudged] = {}
        numbered = enumerate(episodes)

        async def worker() -> None:
            for number, episode in numbered:  # shared: every worker takes the next one
                found[number] = await self.ask(episode)
                on_verdict(found[number])

        await asyncio.gather(*(worker() for _ in range(max_parallel)))
        return [found[number] for number in sorted(found)]

    def _impossible(self, episode: Episode) -> str:
        """Why the runner would not ask a judge about an episode that ended so; empty if it would."""
        reason, output = episode.stop_reason, episode.output
        if reason is StopReason.CHECK_ABORTED:
            return "a check ended it, so its reward is rollout.agent_madness_reward, whoever judges"
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

