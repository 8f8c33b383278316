"""Interface of environments, with Gymnasium's terms.

One instance serves one episode. Actions, observations and evaluations are JSON-serializable, so an instance can run in
another process, on another machine, or in another language. This module imports only the standard library, because the
environment service lends it to interpreters without ASTuner.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from astuner.contracts.errors import shown
from astuner.contracts.scalars import as_float
from astuner.contracts.types import Task, check_success, counts_as_success


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Result of an action: Gymnasium's five values, with text as the observation."""

    observation: str
    reward: float = 0.0
    terminated: bool = False
    """Whether the episode reached a final state: solved, lost, or given up."""
    truncated: bool = False
    """Whether a step or time limit ended the episode."""
    info: Mapping[str, Any] = field(default_factory=dict)
    messages: Sequence[Mapping[str, Any]] = ()
    """The observation as OpenAI-style messages, if it is not a single user message, e.g. with a system prompt."""

    @property
    def is_over(self) -> bool:
        return self.terminated or self.truncated

    @property
    def as_messages(self) -> tuple[Mapping[str, Any], ...]:
        """Return `messages`, or the observation as a single user message."""
        return tuple(self.messages) or ({"role": "user", "content": self.observation},)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The current score of an episode."""

    score: float
    """Higher is better. `Environment.describe` documents the scale."""
    success: bool | None = None
    """Whether the episode succeeded. None: a score of 1 or more counts as success."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """JSON-serializable data for judges of this environment, e.g. which tests passed."""

    def __post_init__(self) -> None:
        if (score := as_float(self.score)) is None:
            raise ValueError(f"the score must be a finite number, not {shown(self.score)}")
        object.__setattr__(self, "score", score)
        object.__setattr__(self, "success", check_success("success", self.success))

    @property
    def is_success(self) -> bool:
        return counts_as_success(self.score, self.success)

    @classmethod
    def of(cls, value: Evaluation | float) -> Evaluation:
        """Return ``value`` as an `Evaluation`; a number becomes its score."""
        return value if isinstance(value, Evaluation) else cls(score=value)


class Environment(ABC):
    """One instance of an environment."""

    def __init__(self, params: Mapping[str, Any] | None = None) -> None:
        """Store the parameters. Do not open files or connections yet.

        :param params: ``astuner.env_service.params`` of the experiment, or the parameters of a request to the service.
        """
        self.params: Mapping[str, Any] = dict(params or {})

    @classmethod
    @abstractmethod
    def tasks(cls, split: str, params: Mapping[str, Any]) -> Iterable[Task]:
        """Return the tasks of a split, always the same tasks in the same order.

        :raises ValueError: The split does not exist. List the available splits in the message.
        """

    @abstractmethod
    def reset(self, task: Task) -> StepResult:
        """Start an episode of ``task``; the result's messages are the first input of the agent.

        A task from `tasks` must be startable from its ``task_id`` only, because the service may transmit nothing else.

        :raises ValueError: The task does not exist.
        """

    @abstractmethod
    def step(self, action: Mapping[str, Any]) -> StepResult:
        """Execute an action and return its result.

        A model wrote the action, so it may be invalid: return an observation that describes the problem. Raise only if
        the environment itself is broken; this ends the episode.

        :param action: OpenAI-style assistant message (``role``, ``content``, ``tool_calls``).
        """

    @abstractmethod
    def evaluate(self) -> Evaluation | float:
        """Return the current score, without changing the environment. A number is short for `Evaluation`."""

    def describe(self) -> Mapping[str, Any]:
        """Return documentation for users and agents (rules, tools, limits), JSON-serializable."""
        return {}

    def interrupt(self) -> None:
        """End a call that may still run in another thread, if possible, because the episode is over.

        The interrupted call raises; its result is discarded. This method may be called repeatedly, also without a
        running call. Only `close` is called afterwards.
        """
        return None

    def close(self) -> None:
        """Release all resources. Called once, also after a failure."""
        return None
