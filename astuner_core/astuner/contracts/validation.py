"""Results of validations per task, and the selection of the best validation.

Validations are compared on the tasks that all of them scored. If episodes of hard tasks fail, a success rate over the
remaining tasks would make a policy look better than it is.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, TypeAlias

from astuner.contracts.statistics import mean, percent
from astuner.contracts.types import Episode, Task

COMPARABLE_SHARE = 0.5
"""Minimum share of tasks, relative to the validation with most tasks, that compared validations have in common."""
HOW_TO_DEFINE = "return is_success with the reward, as in JudgeOutput(reward=…, is_success=…)"
"""How to define success if it is not a reward of 1 or more."""
_DIGITS = 9
"""Decimals to which equal means agree, because sums of floats depend on their order."""


@dataclass(frozen=True)
class TaskResult:
    """Result of the scored episodes of a task."""

    successes: int
    scored: int
    """Number of scored episodes, at least 1."""
    stated: int
    """Number of episodes for which a judge or workflow set ``is_success``."""
    reward: float
    """Mean reward of the scored episodes."""

    @property
    def success(self) -> float:
        return self.successes / self.scored

    @classmethod
    def of(cls, episodes: Iterable[Episode]) -> TaskResult | None:
        """Return the result of a task's episodes, or None if no episode was scored."""
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
"""Results of a validation: key of a task (`task_keys`) -> its result. Tasks without scored episodes are missing."""


def states_success(episode: Episode) -> bool:
    """Return whether a judge or workflow set ``is_success``; limits and checks do not count."""
    by_rule = episode.reward_source in ("limit", "check")
    return episode.verdict is not None and episode.verdict.is_success is not None and not by_rule


def task_keys(tasks: Sequence[Task]) -> list[str]:
    """Return a key for each task: a hash of its question, numbered if tasks repeat.

    A task keeps its key when other tasks are added, removed or reordered.
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
    """Return results as JSON data, about 30 bytes per task."""
    return {key: [result.successes, result.scored, result.stated, result.reward] for key, result in results.items()}


def read_results(row: Mapping[str, Sequence[Any]]) -> dict[str, TaskResult]:
    """Return the results in the output of `results_row`.

    :raises TypeError: The data has another format.
    :raises ValueError: The data has another format.
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
    """The best of several validations and the compared figures."""

    step: int
    tasks: int | None
    """Number of common tasks; None if results per task are missing, so that each validation uses its own tasks."""
    compared: Mapping[int, Figures]
    """Step -> means over these tasks."""
    not_comparable: Sequence[int] = ()
    """Steps whose validation has too few tasks in common with the others."""

    def __str__(self) -> str:
        figures = self.compared[self.step]
        over = "each one's own tasks" if self.tasks is None else f"the {self.tasks} tasks scored by all"
        text = f"success {percent(figures.success, 1)}, reward {figures.reward:.3g}"
        if len(self.compared) > 1:
            text += f", compared with {_steps([s for s in self.compared if s != self.step])} on {over}"
        if self.not_comparable:
            text += f"; not comparable because too many tasks failed: {_steps(self.not_comparable)}"
        return text

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON data."""
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
    """Return the best validation by success, then reward, then step; None without results.

    Validations are compared on the tasks that all of them scored. Starting with the validation with most tasks, each
    further one is included if at least `COMPARABLE_SHARE` of these tasks remain in common. Other validations are not
    comparable and cannot be the best.

    :param validations: Step -> results.
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
    """Return the step with the best means by success, then reward; for equal means, the newest step."""
    return max(figures, key=lambda step: (*(round(value, _DIGITS) for value in astuple(figures[step])), step))
