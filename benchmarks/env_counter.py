"""Environment without work: a step costs only the service's own work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from astuner.contracts.environment import Environment, StepResult
from astuner.contracts.types import Task


class Counter(Environment):
    """Environment that counts its steps."""

    count = 0

    @classmethod
    def tasks(cls, split: str, params: Mapping[str, Any]) -> Iterable[Task]:
        return [Task(task_id="count", env_type="counter")]

    def reset(self, task: Task) -> StepResult:
        return StepResult(observation="count")

    def step(self, action: Mapping[str, Any]) -> StepResult:
        self.count += 1
        return StepResult(observation=str(self.count))

    def evaluate(self) -> float:
        return 1.0
