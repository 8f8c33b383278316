"""What a validation found of each task, and which of several validations was the best.

Validations are compared on the tasks that all of them scored: where episodes fail, each has a success over other tasks,
and hard tasks that fail make a policy look better than it is.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, TypeAlias

from astuner.contracts.statistics import mean
from astuner.contracts.types import Episode, Task

COMPARABLE_SHARE = 0.5
"""Validations are compared as long as they have this share of the tasks of the fullest one in common."""
HOW_TO_DEFINE = "return is_success with the reward, as in JudgeOutput(reward=…, is_success=…)"
"""What defines success where a reward of 1 or more does not."""
_DIGITS = 9
"""Means are equal when they agree to so many decimals: sums of floats depend on their order."""


@dataclass(frozen=True)
class TaskResult:
    """What the scored episodes of one task came to."""

    successes: int
    scored: int
    """Episodes; 1 or more."""
    stated: int
    """Episodes of which a judge or a workflow stated whether they succeeded (``is_success``)."""
    reward: float
    """The mean over them."""

    @property
    def success(self) -> float:
        return self.successes / self.scored

    @classmethod
    def of(cls, episodes: Iterable[Episode]) -> TaskResult | None:
        """Return the result of a task's episodes; None where none of them was scored."""
        scored = [e for e in episodes if e.reward is not None]
        if not scored:
            return None
        return cls(
            successes=sum(bool(e.is_success) for e in scored),
            scored=len(scored),
            stated=sum(states_success(e) for e in scored),
            reward=mean([e.reward for e in scored if e.reward is not None]),
        )


Results: TypeAlias = Mapping[str, TaskResult]
"""Of a validation: the key of a task (`task_keys`) -> its result; a task without a scored episode is missing."""


def states_success(episode: Episode) -> bool:
    """Return whether a judge or a workflow stated whether the episode succeeded; a limit or a check does not count."""
    by_rule = episode.reward_source in ("limit", "check")
    return episode.verdict is not None and episode.verdict.is_success is not None and not by_rule


def task_keys(tasks: Sequence[Task]) -> list[str]:
    """Return a key for each task: a hash of its question, numbered if tasks repeat.

    So a task keeps its key when others are added, removed or reordered.
    """
    seen: Counter[str] = Counter()
    keys = []
    for task in tasks:
        asked = json.dumps([task.task_id, task.main_query, task.init_messages], sort_keys=True, default=str)
        key = hashlib.sha256(asked.encode()).hexdigest()[:12]
        seen[key] += 1
        keys.append(f"{key}#{seen[key]}" if seen[key] > 1 else key)
    return keys


def results_row(results: Results) -> dict[str, list[float]]:
    """Return results as JSON, some 30 bytes a task."""
    return {key: [result.successes, result.scored, result.stated, result.reward] for key, result in results.items()}


def read_results(row: Mapping[str, Sequence[Any]]) -> dict[str, TaskResult]:
    """Return what `results_row` wrote.

    :raises TypeError: it did not write that; or `ValueError`.
    """
    return {
        key: TaskResult(int(successes), int(scored), int(stated), float(reward))
        for key, (successes, scored, stated, reward) in row.items()
    }


@dataclass(frozen=True)
class Figures:
    """Means over tasks."""

    success: float
    reward: float

    @classmethod
    def of(cls, results: Results, tasks: Iterable[str]) -> Figures:
        chosen = [results[task] for task in tasks]
        return cls(mean([r.success for r in chosen]), mean([r.reward for r in chosen]))


@dataclass(frozen=True)
class Best:
    """The best of several validations, and how that was found."""

    step: int
    tasks: int | None
    """On which they were compared, the same for all; None: results of tasks are missing, so each has its own."""
    compared: Mapping[int, Figures]
    """Step -> its means over these tasks."""
    not_comparable: Sequence[int] = ()
    """Steps whose validation has too few tasks in common with the others."""

    def __str__(self) -> str:
        figures = self.compared[self.step]
        over = "its own tasks" if self.tasks is None else f"the {self.tasks} tasks that all of them scored"
        text = f"success {figures.success:.1%}, reward {figures.reward:.3g}"
        if len(self.compared) > 1:
            text += f", compared with {_steps([s for s in self.compared if s != self.step])} on {over}"
        if self.not_comparable:
            text += f"; not comparable, since too many other tasks failed there: {_steps(self.not_comparable)}"
        return text

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        compared = [{"step": step, **vars(figures)} for step, figures in self.compared.items()]
        return {
            "step": self.step,
            "tasks": self.tasks,
            "compared": compared,
            "not_comparable": list(self.not_comparable),
        }


def _steps(steps: Sequence[int]) -> str:
    return f"step{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}"


def best_of(validations: Mapping[int, Results]) -> Best | None:
    """Return the best validation by success, then by reward; the newest of equals. None where there is none.

    They are compared on the tasks that all of them scored.  The fullest one comes first, then each that leaves at least
    `COMPARABLE_SHARE` of its tasks in common; the others cannot be compared, and so are not the best.

    :param validations: step -> what was found.
    """
    fullest_first = sorted(validations, key=lambda step: (len(validations[step]), step), reverse=True)
    if not fullest_first or not validations[fullest_first[0]]:
        return None
    common = set(validations[fullest_first[0]])
    least, compared = COMPARABLE_SHARE * len(common), []
    for step in fullest_first:
        if len(both := common & validations[step].keys()) >= least:
            common = both
            compared.append(step)
    figures = {step: Figures.of(validations[step], sorted(common)) for step in sorted(compared)}
    not_comparable = sorted(validations.keys() - figures.keys())
    return Best(best_step(figures), len(common), figures, not_comparable)


def best_step(figures: Mapping[int, Figures]) -> int:
    """Return the step with the best means: by success, then by reward, the newest of equals."""
    return max(figures, key=lambda step: (*(round(value, _DIGITS) for value in astuple(figures[step])), step))
