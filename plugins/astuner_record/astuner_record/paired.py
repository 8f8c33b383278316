"""Compare two policies on the same tasks: choose a measure and test whether the difference is significant.

The verdict of a run and the promotion gate use the same functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from astuner.contracts.statistics import mean, percent
from astuner.contracts.validation import HOW_TO_DEFINE, TaskResult
from astuner_record.statistics import (
    Interval,
    PairedTable,
    bootstrap_interval,
    mcnemar_exact,
    paired_success_interval,
    sign_flip_test,
)

Pairs: TypeAlias = Sequence[tuple[TaskResult, TaskResult]]
"""Results of each task on both sides: before and after training, or serving model and candidate."""
Measure: TypeAlias = Literal["success", "reward"]
LEVEL = 0.05
"""Significance level of every test."""
FEWEST = 6
"""Pairs that a paired test needs to reach `LEVEL`. With 5 differing pairs, p is at least 2 / 2^5 = 0.0625."""
_EQUAL = 1e-9
"""Rewards are equal if they differ by less than this, relative to the largest reward."""


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """Means of one measure over the same tasks on both sides, and their difference."""

    before: float
    after: float
    mean: float
    interval: Interval
    """95 % interval of the mean difference."""
    p: float
    test: str
    tasks: int
    """Number of pairs."""
    changed: Mapping[str, int]
    """Direction of change -> number of tasks."""

    @property
    def significant(self) -> bool:
        return self.p < LEVEL

    @property
    def moved(self) -> bool:
        """Whether any task changed."""
        return any(self.changed.values())

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a JSON object."""
        return {
            "before": self.before,
            "after": self.after,
            "mean": self.mean,
            "low": self.interval.low,
            "high": self.interval.high,
            "p": self.p,
            "significant": self.significant,
            "test": f"{self.test}, paired by task",
            "tasks": self.tasks,
            "changed": dict(self.changed),
        }


def success_test(pairs: Pairs) -> PairedDifference:
    """Test the difference in success: McNemar's test if every task succeeds or fails, otherwise the sign-flip test."""
    shares = [(before.success, after.success) for before, after in pairs]
    if not all(share in (0.0, 1.0) for pair in shares for share in pair):
        return _sign_flip(shares)
    table = PairedTable.of([(bool(before), bool(after)) for before, after in shares])
    return PairedDifference(
        before=mean([before for before, _ in shares]),
        after=mean([after for _, after in shares]),
        mean=mean([after - before for before, after in shares]),
        interval=paired_success_interval(table),
        p=mcnemar_exact(table),
        test="McNemar's exact test",
        tasks=len(pairs),
        changed={"became right": table.only_b, "became wrong": table.only_a},
    )


def reward_test(pairs: Pairs) -> PairedDifference:
    """Test the difference in reward with the sign-flip test."""
    return _sign_flip([(before.reward, after.reward) for before, after in pairs])


def _sign_flip(values: Sequence[tuple[float, float]]) -> PairedDifference:
    size = max((abs(value) for pair in values for value in pair), default=0.0)
    differences = [0.0 if abs(b - a) <= _EQUAL * size else b - a for a, b in values]
    return PairedDifference(
        before=mean([before for before, _ in values]),
        after=mean([after for _, after in values]),
        mean=mean(differences),
        interval=bootstrap_interval(differences),
        p=sign_flip_test(differences),
        test="sign-flip permutation test",
        tasks=len(values),
        changed={"better": sum(d > 0 for d in differences), "worse": sum(d < 0 for d in differences)},
    )


@dataclass(frozen=True)
class Choice:
    """Measure that separates two sides."""

    measure: Measure
    reason: str = ""
    """Why the measure is not success; empty for success."""
    stated: bool = False
    """Whether a judge or workflow defines success. Otherwise success is a reward of 1 or more."""
    constant: float | None = None
    """Success of every task on both sides if it is the same for all tasks, otherwise None."""


def choose_measure(pairs: Pairs) -> Choice:
    """Return success, or the reward if success cannot separate the two sides and the reward carries more information.

    The reward is chosen if success is the same for every task. It is also chosen if success is undefined and so few
    tasks reach a reward of 1, or miss it, that no test of success can reach `LEVEL`. The choice depends on the
    measured values and not on which side is better, so it does not make the test more lenient.
    """
    results = [result for pair in pairs for result in pair]
    stated = any(result.stated for result in results)
    shares = {result.success for result in results}
    constant = next(iter(shares)) if len(shares) == 1 else None
    if not _reward_says_more(results):
        return Choice("success", "", stated, constant)
    if constant is not None:
        what = "set together with the reward" if stated else "a reward of 1 or more"
        hint = "" if stated else f"; to define it, {HOW_TO_DEFINE}"
        reason = f"success ({what}) is {percent(constant, 1)} on both sides and does not separate them{hint}"
        return Choice("reward", reason, stated, constant)
    reached, missed = (sum(any(map(of, pair)) for pair in pairs) for of in (_succeeds, _fails))
    if stated or min(reached, missed) >= FEWEST or len(pairs) < FEWEST:
        return Choice("success", "", stated)
    reason = (
        f"success (a reward of 1 or more) separates little: {reached} of {len(pairs)} tasks ever reach it and {missed} "
        f"ever miss it; to define it, {HOW_TO_DEFINE}"
    )
    return Choice("reward", reason, stated)


def _succeeds(result: TaskResult) -> bool:
    return result.successes > 0


def _fails(result: TaskResult) -> bool:
    return result.successes < result.scored


def _reward_says_more(results: Sequence[TaskResult]) -> bool:
    """Return whether rewards are more than a rescaled success, such as 0 and 1, or -1 and 1."""
    low, high = (choose(results, key=lambda r: r.success) for choose in (min, max))
    slope = (high.reward - low.reward) / (high.success - low.success) if high.success > low.success else 0.0
    error = _EQUAL * max(1.0, *(abs(result.reward) for result in results))
    return any(abs(low.reward + slope * (r.success - low.success) - r.reward) > error for r in results)
