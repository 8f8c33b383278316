"""How good the policy is on tasks it does not train on, with an honest interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from astuner.errors import RunError
from astuner.rollout.metrics import mean, wilson_interval
from astuner.rollout.pool import Group
from astuner.types import Episode


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Success and reward over a set of tasks."""

    tasks: int
    """Tasks with at least one scored episode."""
    repeat: int
    success: float
    """Mean over tasks of the share of successful episodes (mean@k)."""
    ci_low: float
    ci_high: float
    """95 %: Wilson's for one episode per task, else normal over task means (episodes of a task are not independent)."""
    pass_at_k: float
    """Share of tasks with at least one success among `repeat` episodes."""
    reward: float
    failed_episodes: int
    """Not scored; in neither the numerator nor the denominator."""

    def metrics(self) -> dict[str, float]:
        """As named numbers, for the log sinks."""
        return {
            f"val/success/mean@{self.repeat}": self.success,
            f"val/success/pass@{self.repeat}": self.pass_at_k,
            "val/success": self.success,
            "val/success_ci_low": self.ci_low,
            "val/success_ci_high": self.ci_high,
            "val/reward/mean": self.reward,
            "val/tasks": float(self.tasks),
            "val/failed_episodes": float(self.failed_episodes),
        }

    def __str__(self) -> str:
        text = f"{self.success:.1%} [{self.ci_low:.1%}, {self.ci_high:.1%}] of {self.tasks} tasks"
        return text + (f", {self.failed_episodes} episodes failed and were not counted" if self.failed_episodes else "")


def evaluate_groups(groups: Sequence[Group], *, repeat: int) -> Evaluation:
    """Summarise validation groups (one per task).

    :raises RunError: no episode could be scored, so there is nothing to say about the policy.
    """
    scored = [g.scored for g in groups if g.scored]
    if not scored:
        episodes = [e for g in groups for e in g.episodes]
        raise RunError(
            f"validation: none of {len(episodes)} episodes could be scored; the first one: "
            f"{describe_failure(episodes[0])}"
        )
    shares = [mean([float(bool(e.is_success)) for e in episodes]) for episodes in scored]
    success, n = mean(shares), len(shares)
    if repeat == 1:
        low, high = wilson_interval(round(sum(shares)), n)
    elif n > 1:
        error = 1.959964 * math.sqrt(math.fsum((s - success) ** 2 for s in shares) / (n - 1) / n)
        low, high = max(0.0, success - error), min(1.0, success + error)
    else:
        low, high = 0.0, 1.0
    episodes = [e for group in scored for e in group]
    return Evaluation(
        tasks=n,
        repeat=repeat,
        success=success,
        ci_low=low,
        ci_high=high,
        pass_at_k=mean([float(s > 0) for s in shares]),
        reward=mean([e.reward for e in episodes if e.reward is not None]),
        failed_episodes=sum(len(g.episodes) for g in groups) - len(episodes),
    )


def describe_failure(episode: Episode) -> str:
    """How an episode that is not scored ended, in one line."""
    return f"{episode.stop_reason.value}: {episode.error or 'no message'}"
