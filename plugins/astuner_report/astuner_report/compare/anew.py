"""Judge the compared episodes of both sides again with one judge.

Invariant: nothing is written. An episode keeps a reward that a rule assigned (a check or a limit ended it). An episode
that the judge does not score counts as not scored.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from astuner import Config, end_loop
from astuner.contracts.errors import DataError
from astuner.contracts.types import StopReason
from astuner_record.episode_log import EpisodeLog
from astuner_record.episode_log.reader import Listed
from astuner_record.replay.verdicts import Rejudge, Rejudged


class Anew:
    """A judge with the settings of one run, for the episodes of all runs."""

    def __init__(
        self, config: Config, loop: asyncio.AbstractEventLoop, parallel: int, say: Callable[[str], None]
    ) -> None:
        self._rejudge, self._loop, self._parallel, self._say = Rejudge(config), loop, parallel, say
        self._judged = self._by_rule = 0
        self._not_judged: Counter[str] = Counter()

    @property
    def said(self) -> dict[str, Any]:
        """Return, for ``--json``, the judge's name and the numbers of episodes judged and not judged, by reason."""
        counted = {"judged": self._judged, "by_rule": self._by_rule, "not_judged": dict(self._not_judged)}
        return {"name": self._rejudge.name, **counted}

    def verdicts(self, run: Path, log: EpisodeLog, chosen: Sequence[Listed]) -> list[Listed]:
        """Return the same episodes with the new verdicts.

        :raises DataError: the judge scores none of them.
        """
        done = 0

        def progress(_: Rejudged) -> None:
            nonlocal done
            done += 1
            if done % max(1, len(chosen) // 20) == 0 or done == len(chosen):
                self._say(f"{run.name}: {done:,} of {len(chosen):,} episodes judged")

        episodes = (log.read(listed).episode for listed in chosen)
        asking = self._rejudge.ask_all(episodes, max_parallel=self._parallel, on_verdict=progress)
        found = self._loop.run_until_complete(asking)
        if all(one.verdict is None for one in found):
            whys = "; ".join(why for why, _ in Counter(one.why for one in found).most_common(3))
            raise DataError(f"{run}: {self._rejudge.name} did not score any of {len(found)} episodes: {whys}")
        return [self._new(listed, one) for listed, one in zip(chosen, found, strict=True)]

    def _new(self, listed: Listed, one: Rejudged) -> Listed:
        judged = one.judged
        if judged is not None:
            self._judged += 1
            return replace(listed, reward=judged.reward, success=judged.is_success)
        if one.episode.reward_source in ("check", "limit"):
            self._by_rule += 1
            return listed
        self._not_judged[one.why] += 1
        ended = listed.stop_reason if listed.reward is None else StopReason.JUDGE_FAILED.value
        return replace(listed, reward=None, success=None, stop_reason=ended)


@contextmanager
def judging(config: Config, *, parallel: int, say: Callable[[str], None]) -> Iterator[Anew]:
    """Yield a judge for the episodes of a comparison.

    :param config: config of a run; `task_judge.judge` is the judge to use.
    :param parallel: number of episodes, or groups, judged concurrently.
    :param say: called with each progress message.
    :raises ConfigError: the judge does not exist.
    """
    loop = asyncio.new_event_loop()
    try:
        yield Anew(config, loop, parallel, say)
    finally:
        end_loop(loop, 2.0)
