"""Metrics of a step's episodes and samples (``docs/metrics.md``), and the evaluation of a policy.

`evaluate_groups` measures success on validation tasks, with a confidence interval.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from astuner.contracts.errors import RunError
from astuner.contracts.statistics import mean, percent, wilson_interval
from astuner.contracts.types import Episode, FinishReason, Sample, Turn, wasted_prompt
from astuner.contracts.validation import HOW_TO_DEFINE, states_success
from astuner.rollout.credit import Scored, populations
from astuner.rollout.endings import cut_by, ended_by
from astuner.rollout.pool import Group

if TYPE_CHECKING:
    from astuner.config.schema import AstunerSection

Metrics = dict[str, float]


def rollout_metrics(groups: Sequence[Group], settings: AstunerSection | None = None) -> Metrics:
    """Return rewards, successes, lengths, limits and failures of one step's groups.

    :param settings: Settings of the limits; None to omit the metrics of limits.
    """
    episodes = [e for g in groups for e in g.episodes]
    scored = [e for e in episodes if e.reward is not None]
    turns = [t for e in scored for t in e.turns]
    rewards = [e.reward for e in scored if e.reward is not None]
    spread = [g for g in groups if g.has_spread]
    metrics = {
        "rollout/episodes": float(len(episodes)),
        "rollout/groups": float(len(groups)),
        "rollout/errored_frac": 1 - len(scored) / len(episodes) if episodes else 0.0,
        "rollout/seconds_max": max((e.seconds for e in episodes), default=0.0),
        "adv/zero_group_frac": 1 - len(spread) / len(groups) if groups else 0.0,
        "tokens/generated": float(sum(len(t.generation.response_ids) for t in turns)),
        **_spread("reward", rewards),
        "success/mean": mean([float(bool(e.is_success)) for e in scored]),
        "success/stated": mean([float(states_success(e)) for e in scored]),
        "num_turns/mean": mean([float(len(e.turns)) for e in scored]),
        "response_length/mean": mean([float(sum(len(t.generation.response_ids) for t in e.turns)) for e in scored]),
        "response_length/clip_ratio": mean([float(t.generation.finish_reason is FinishReason.LENGTH) for t in turns]),
        "tool_calls/malformed_frac": mean([float("unparsed_tool_calls" in t.message) for t in turns]),
        "merge/exact_frac": continued_share(scored),
        "merge/approximated_frac": mean([float(bool(t.approximation)) for t in turns]),
        "tokens/wasted_prompt": float(wasted_prompt(turns)),
        **_counted(turns),
        **_per_role(scored),
        **(_limits(episodes, settings) if settings else {}),
    }
    for prefix, values in (
        ("workflow", [e.output.metrics for e in scored if e.output]),
        ("judge", [e.verdict.metrics for e in scored if e.verdict]),
    ):
        metrics.update({f"{prefix}/{name}": value for name, value in _average(values).items()})
    return metrics


def _limits(episodes: Sequence[Episode], settings: AstunerSection) -> Metrics:
    """Return, for each limit, the share of truncated calls or of ended episodes, whichever is larger."""
    turns = [(t, e.turns) for e in episodes for t in e.turns]
    cut = Counter(cut_by(t, of, settings) for t, of in turns if t.generation.finish_reason is FinishReason.LENGTH)
    ended = Counter(filter(None, map(ended_by, episodes)))
    found: Metrics = {}
    for counts, n in ((cut, len(turns)), (ended, len(episodes))):
        for key, count in counts.items():
            name = f"limits/{key.removeprefix('astuner.') or 'other'}"
            found[name] = max(found.get(name, 0.0), count / n)
    return found


def _counted(turns: Sequence[Turn]) -> Metrics:
    """Return counts of events at single turns: new branches, by reason, and notes on requests."""
    counts = Counter(f"merge/branches/{t.branch_reason}" for t in turns if t.branch_reason)
    for turn in turns:
        counts.update(turn.notes)
    return {name: float(n) for name, n in sorted(counts.items())}


def _per_role(episodes: Sequence[Episode]) -> Metrics:
    """Return the mean reward of each role's trained agents over episodes that distinguish agents.

    An episode counts once, independent of the size of its team.
    """
    told = [Scored.of(e, (), agents_named=True) for e in episodes if e.verdict and e.verdict.rewards]
    metrics = {}
    for role, entries in populations(told, "role").items():
        teams: dict[int, list[float]] = {}
        for i, credit in entries:
            teams.setdefault(i, []).append(credit.reward)
        metrics[f"reward/{role}/mean"] = mean([mean(rewards) for rewards in teams.values()])
    return metrics


def sample_metrics(
    samples: Sequence[Sample], scored_episodes: int, policy_version: int, policies: Sequence[str] = ()
) -> Metrics:
    """Return how episodes were split into samples, their advantages, and the age of their tokens.

    :param policies: Trained policies with separate metrics; empty if there is only one policy.
    """
    known = [s.policy_version for s in samples if s.policy_version >= 0]
    staleness = [float(policy_version - version) for version in known]
    trained = {s.episode_id for s in samples if s.trained_tokens}
    metrics = {
        "merge/samples_per_rollout": len(samples) / scored_episodes if scored_episodes else 0.0,
        "merge/untrained_rollout_frac": 1 - len(trained) / scored_episodes if scored_episodes else 0.0,
        "tokens/trainable": float(sum(s.trained_tokens for s in samples)),
        "staleness/mean": mean(staleness),
        "staleness/max": max(staleness, default=0.0),
        **({"policy_version": float(max(known))} if known else {}),
        **_credit_metrics(samples),
    }
    for policy in policies:
        mine = _credit_metrics([s for s in samples if s.policy == policy])
        metrics.update({f"policy/{policy}/{name}": value for name, value in mine.items()})
    return metrics


_POLICY = re.compile(r"(policy/[^/]+/)(.+)")


def derived(metrics: Mapping[str, float]) -> Metrics:
    """Return metrics computed from others. `Run.publish` adds them, so they are defined once."""
    found: Metrics = {}
    for name, value in metrics.items():
        whose, bare = (policy[1], policy[2]) if (policy := _POLICY.fullmatch(name)) else ("", name)
        if bare == "staleness/mean":
            found[f"{whose}policy_staleness"] = value
        if bare == "clip_frac/low" and (high := metrics.get(f"{whose}clip_frac/high")) is not None:
            found[f"{whose}clip_frac"] = value + high
    return found


def _credit_metrics(samples: Sequence[Sample]) -> Metrics:
    """Return the learning signal of one policy, or of all."""
    rewards = [s.reward for s in samples]
    spread = {"adv/reward_min": min(rewards), "adv/reward_max": max(rewards)} if rewards else {}
    return {"adv/zero_frac": mean([float(s.advantage == 0) for s in samples]) if samples else 1.0, **spread}


def continued_share(episodes: Iterable[Episode]) -> float:
    """Return the share of later turns (not an agent's first) that continue an earlier one exactly; 1 without any.

    As in the certificate, a turn that continues an almost equal one is not exact.
    """
    later = [t for e in episodes for t in e.turns if t.continues is not None or t.branch_reason]
    return mean([float(t.continues is not None and not t.approximation) for t in later]) if later else 1.0


def _spread(name: str, values: Sequence[float]) -> Metrics:
    m = mean(values)
    std = math.sqrt(mean([(v - m) * (v - m) for v in values]))  # ** raises on overflow
    return {
        f"{name}/mean": m,
        f"{name}/std": std,
        f"{name}/max": max(values, default=0.0),
        f"{name}/min": min(values, default=0.0),
    }


def _average(rows: Sequence[Mapping[str, float]]) -> Metrics:
    collected: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            collected.setdefault(name, []).append(float(value))
    return {name: mean(values) for name, values in collected.items()}


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Success and reward over a set of tasks."""

    tasks: int
    """Tasks with at least one scored episode."""
    unscored_tasks: int
    """Tasks without a scored episode; not part of the success rate."""
    repeat: int
    success: float
    """Mean over tasks of the share of successful episodes (mean@k)."""
    ci_low: float
    ci_high: float
    """95 % interval: Wilson's for one episode per task, otherwise normal over task means (episodes of a task are not
    independent)."""
    pass_at_k: float
    """Share of tasks with at least one success among `repeat` episodes."""
    reward: float
    failed_episodes: int
    """Episodes that were not scored; not part of the success rate."""
    success_stated: float = 0.0
    """Share of scored episodes whose success was set by a judge or a workflow."""

    @property
    def hint(self) -> str:
        """How to define success, if success is equal for all tasks but the reward is not; otherwise empty."""
        constant = self.pass_at_k == 0 or self.success == 1
        if self.success_stated or not constant or math.isclose(self.reward, self.success, abs_tol=1e-6):
            return ""
        return f"success (a reward of 1 or more) does not separate the policies here. To define it, {HOW_TO_DEFINE}"

    def metrics(self) -> dict[str, float]:
        """Return the evaluation as named numbers for log sinks."""
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
            "val/success_stated": self.success_stated,
        }

    def __str__(self) -> str:
        success, low, high = (percent(share, 1) for share in (self.success, self.ci_low, self.ci_high))
        return f"{success} [{low}, {high}] of {counted(self.metrics())}"


def counted(metrics: Mapping[str, float]) -> str:
    """Return the number of evaluated tasks: ``5 of 32 tasks; 27 episodes failed and were not counted``.

    It accompanies every success rate, because tasks that always fail are not part of it.

    :param metrics: Result of `Evaluation.metrics`.
    """
    tasks, unscored = metrics["val/tasks"], metrics.get("val/unscored_tasks", 0)  # missing in runs of older versions
    text = f"{tasks:.0f} of {tasks + unscored:.0f} tasks" if unscored else f"{tasks:.0f} tasks"
    failed = metrics.get("val/failed_episodes", 0)
    return text + (f"; {failed:.0f} episodes failed and were not counted" if failed else "")


def reward_beside(metrics: Mapping[str, float]) -> str:
    """Return the mean reward of a validation as the end of a line, ``; reward 0.412``, or "" if it equals success.

    :param metrics: Result of `Evaluation.metrics`.
    """
    reward = metrics.get("val/reward/mean")
    if reward is None or math.isclose(reward, metrics["val/success"], rel_tol=1e-6, abs_tol=1e-6):
        return ""
    return f"; reward {reward:.4g}"


def evaluate_groups(
    groups: Sequence[Group], *, repeat: int, max_failed_share: float, failures: Path | None = None
) -> Evaluation:
    """Evaluate validation groups (one per task).

    :param max_failed_share: `rollout.max_failed_share`. With more failures, success would cover only easy tasks.
    :param failures: File with all failures, if there is one.
    :raises RunError: Too many episodes failed, or none could be scored.
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
        success_stated=mean([float(states_success(e)) for of_task in scored for e in of_task]),
    )


def check_failures(step: int, groups: Sequence[Group], max_failed_share: float, failures: Path) -> None:
    """Check that a step's episodes can be trained on.

    :param max_failed_share: `rollout.max_failed_share`.
    :param failures: File with all failed episodes.
    :raises RunError: Too many episodes failed, or no agent called the model.
    """
    episodes = [e for g in groups for e in g.episodes]
    scored = [e for e in episodes if e.reward is not None]
    if scored and not any(e.turns or e.external for e in scored):
        raise RunError(
            f"step {step}: no agent called the model in {len(scored)} episodes, so there is nothing to train. Pass "
            "model=model_tuner to the agent, or model_tuner.base_url_and_key() (programs have them in OPENAI_BASE_URL "
            "and OPENAI_API_KEY)"
        )
    _check_share(f"step {step}", episodes, max_failed_share, failures)


def _check_share(of: str, episodes: Sequence[Episode], most: float, failures: Path | None) -> None:
    failed = sum(e.reward is None for e in episodes)
    if episodes and failed / len(episodes) > most:
        what = f"{failed} of {len(episodes)} episodes failed (more than rollout.max_failed_share = {most:g})"
        raise _failed(of, what, episodes, failures)


def _failed(of: str, what: str, episodes: Sequence[Episode], failures: Path | None) -> RunError:
    first = next(e for e in episodes if e.reward is None)
    where = f". All failures are in {failures}" if failures else ""
    return RunError(f"{of}: {what}. The first one: {describe_failure(first)}{where}")


def describe_failure(episode: Episode) -> str:
    """Return how an unscored episode ended, in one line."""
    return f"{episode.stop_reason.value}: {episode.error or 'no message'}"
