"""How good the policy is on tasks it does not train on, with an honest interval."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from astuner.contracts.errors import RunError
from astuner.contracts.types import Episode
from astuner.rollout.metrics import mean, wilson_interval
from astuner.rollout.pool import Group


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Success and reward over a set of tasks."""

    tasks: int
    """Tasks with at least one scored episode."""
    unscored_tasks: int
    """Tasks without one; in neither the numerator nor the denominator."""
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
            "val/unscored_tasks": float(self.unscored_tasks),
            "val/failed_episodes": float(self.failed_episodes),
        }

    def __str__(self) -> str:
        return f"{self.success:.1%} [{self.ci_low:.1%}, {self.ci_high:.1%}] of {counted(self.metrics())}"


def counted(metrics: Mapping[str, float]) -> str:
    """What a success is taken over, e.g. ``5 of 32 tasks; 27 episodes failed and were not counted``.

    Said wherever a success is shown: tasks that always fail are not in it.

    :param metrics: of `Evaluation.metrics`.
    """
    tasks, unscored = metrics["val/tasks"], metrics.get("val/unscored_tasks", 0)  # an older run's lacks them
    text = f"{tasks:.0f} of {tasks + unscored:.0f} tasks" if unscored else f"{tasks:.0f} tasks"
    failed = metrics.get("val/failed_episodes", 0)
    return text + (f"; {failed:.0f} episodes failed and were not counted" if failed else "")


def evaluate_groups(
    groups: Sequence[Group], *, repeat: int, max_failed_share: float, failures: Path | None = None
) -> Evaluation:
    """Summarise validation groups (one per task).

    :param max_failed_share: `rollout.max_failed_share`: with more failures the success is of the tasks that are left.
    :param failures: the file that has them all, where they are written down.
    :raises RunError: more episodes failed, or no episode could be scored, so there is nothing to say about the policy.
    """
    scored = [g.scored for g in groups if g.scored]
    episodes = [e for g in groups for e in g.episodes]
    if not scored:
        raise _failed("validation", f"none of {len(episodes)} episodes could be scored", episodes, failures)
    _check_share("validation", episodes, max_failed_share, failures)
    shares = [mean([float(bool(e.is_success)) for e in episodes]) for episodes in scored]
    success, n = mean(shares), len(shares)
    if repeat == 1:
        low, high = wilson_interval(round(sum(shares)), n)
    elif n > 1:
        error = 1.959964 * math.sqrt(math.fsum((s - success) ** 2 for s in shares) / (n - 1) / n)
        low, high = max(0.0, success - error), min(1.0, success + error)
    else:
        low, high = 0.0, 1.0
    return Evaluation(
        tasks=n,
        unscored_tasks=len(groups) - n,
        repeat=repeat,
        success=success,
        ci_low=low,
        ci_high=high,
        pass_at_k=mean([float(s > 0) for s in shares]),
        reward=mean([e.reward for e in episodes if e.reward is not None]),
        failed_episodes=sum(e.reward is None for g in groups for e in g.episodes),
    )


def check_failures(step: int, groups: Sequence[Group], max_failed_share: float, failures: Path) -> None:
    """Whether a step's episodes are worth training on.

    :param max_failed_share: `rollout.max_failed_share`.
    :param failures: the file that has all failed episodes.
    :raises RunError: more episodes failed, or in none of them the agent asked the model.
    """
    episodes = [e for g in groups for e in g.episodes]
    scored = [e for e in episodes if e.reward is not None]
    if scored and not any(e.turns or e.external for e in scored):
        raise RunError(
            f"step {step}: in none of {len(scored)} episodes did the agent ask the model, so there is nothing to "
            "train; pass model=model_tuner to the agent, or give it model_tuner.base_url_and_key() (a program has "
            "them in OPENAI_BASE_URL and OPENAI_API_KEY)"
        )
    _check_share(f"step {step}", episodes, max_failed_share, failures)


def _check_share(of: str, episodes: Sequence[Episode], most: float, failures: Path | None) -> None:
    failed = sum(e.reward is None for e in episodes)
    if episodes and failed / len(episodes) > most:
        what = f"{failed} of {len(episodes)} episodes failed (more than rollout.max_failed_share = {most:g})"
        raise _failed(of, what, episodes, failures)


def _failed(of: str, what: str, episodes: Sequence[Episode], failures: Path | None) -> RunError:
    first = next(e for e in episodes if e.reward is None)
    where = f"; all are in {failures}" if failures else ""
    return RunError(f"{of}: {what}; the first one: {describe_failure(first)}{where}")


def describe_failure(episode: Episode) -> str:
    """How an episode that is not scored ended, in one line."""
    return f"{episode.stop_reason.value}: {episode.error or 'no message'}"
