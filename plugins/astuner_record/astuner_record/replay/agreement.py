"""How the verdicts of two judges on the same episodes agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from astuner.rollout.metrics import mean
from astuner_record.replay.verdicts import Rejudged
from astuner_record.statistics import Interval, PairedTable, bootstrap_interval, cohens_kappa


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
