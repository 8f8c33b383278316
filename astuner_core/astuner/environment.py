"""A world an agent acts in, in Gymnasium's words.

One instance serves one episode.  Data goes in and data comes out: actions and observations are
JSON-serialisable, so that an instance can live in a process of its own, on another machine, in another language.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from astuner.types import Split, Task


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What the world answers to an action (Gymnasium's five-tuple without the leading observation's type zoo)."""

    observation: str
    reward: float = 0.0
    terminated: bool = False
    """The world reached an end: solved, lost, or given up."""
    truncated: bool = False
    """The world stopped counting: a step or time limit."""
    info: Mapping[str, Any] = field(default_factory=dict)


class Environment(ABC):
    """One instance of a world."""

    def __init__(self, config: Any = None) -> None:
        self.config = config

    @classmethod
    @abstractmethod
    def tasks(cls, split: Split, params: Mapping[str, Any]) -> Iterator[Task]:
        """The tasks this world offers."""

    @abstractmethod
    def reset(self, task: Task) -> StepResult:
        """Start on ``task``; the result's observation is what the agent sees first."""

    @abstractmethod
    def step(self, action: Mapping[str, Any]) -> StepResult:
        """Act; ``action`` is an OpenAI-style assistant message (``role``, ``content``, ``tool_calls``)."""

    @abstractmethod
    def evaluate(self) -> float:
        """The score of the episode so far. Must not change the world."""

    def describe(self) -> Mapping[str, Any]:
        """What a person or an agent should know: rules, tools, limits. JSON-serialisable."""
        return {}

    def close(self) -> None:
        """Give back everything; called once, also after a failure."""
        return None
