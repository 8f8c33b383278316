"""A world an agent acts in, in Gymnasium's words.

One instance serves one episode.  Data goes in and data comes out: actions, observations and evaluations are
JSON-serialisable, so that an instance can live in a process of its own, on another machine, in another language.
This module needs the standard library only: the environment service lends it to interpreters that have nothing of
ASTuner's installed.
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
    """What the world answers to an action (Gymnasium's five-tuple without the leading observation's type zoo)."""

    observation: str
    reward: float = 0.0
    terminated: bool = False
    """The world reached an end: solved, lost, or given up."""
    truncated: bool = False
    """The world stopped counting: a step or time limit."""
    info: Mapping[str, Any] = field(default_factory=dict)
    messages: Sequence[Mapping[str, Any]] = ()
    """The observation as OpenAI-style messages, where it is more than one from the user: a system prompt first, say."""

    @property
    def is_over(self) -> bool:
        return self.terminated or self.truncated

    @property
    def as_messages(self) -> tuple[Mapping[str, Any], ...]:
        """`messages`, or the observation as the one message of a user."""
        return tuple(self.messages) or ({"role": "user", "content": self.observation},)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How good the episode is so far."""

    score: float
    """Higher is better; what the scale is, the environment says in `Environment.describe`."""
    success: bool | None = None
    """None: the environment does not say; a score of 1 or more then counts as success."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """What judges of this environment read, e.g. which tests passed. JSON-serialisable."""

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
        """A bare number is short for ``Evaluation(score=number)``."""
        return value if isinstance(value, Evaluation) else cls(score=value)


class Environment(ABC):
    """One instance of a world."""

    def __init__(self, params: Mapping[str, Any] | None = None) -> None:
        """Keep the parameters; open nothing yet.

        :param params: the experiment's ``astuner.env_service.params``, or those of a request to the service.
        """
        self.params: Mapping[str, Any] = dict(params or {})

    @classmethod
    @abstractmethod
    def tasks(cls, split: str, params: Mapping[str, Any]) -> Iterable[Task]:
        """The tasks of a split; the same ones in the same order every time.

        :raises ValueError: there is no such split; say which there are.
        """

    @abstractmethod
    def reset(self, task: Task) -> StepResult:
        """Start on ``task``; the result's messages are what the agent sees first.

        A task from `tasks` can be started from its ``task_id`` alone, since that may be all that crosses the wire.

        :raises ValueError: there is no such task.
        """

    @abstractmethod
    def step(self, action: Mapping[str, Any]) -> StepResult:
        """Act; ``action`` is an OpenAI-style assistant message (``role``, ``content``, ``tool_calls``).

        A model wrote it, so anything may be in it: answer what makes no sense with an observation that says so.
        Raising means that the world is broken, and costs the episode.
        """

    @abstractmethod
    def evaluate(self) -> Evaluation | float:
        """How good the episode is so far. Must not change the world; a number is short for `Evaluation`."""

    def describe(self) -> Mapping[str, Any]:
        """What a person or an agent should know: rules, tools, limits. JSON-serialisable."""
        return {}

    def interrupt(self) -> None:
        """The episode is over while a call may be under way in another thread: end that call, if it can be ended.

        It then raises; what it would have returned is nobody's any more.  May be called more than once, also when there
        is no such call; only `close` comes afterwards.
        """
        return None

    def close(self) -> None:
        """Give back everything; called once, also after a failure."""
        return None
