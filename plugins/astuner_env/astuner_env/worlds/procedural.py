"""Share code between environments with generated tasks ``name:seed``; the range of the seed determines the split.

Also parse text and tool calls from assistant messages, which may contain anything.

Invariant: the seeds of two splits are disjoint, so no task is in two splits.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from astuner.contracts.environment import Environment, StepResult
from astuner.contracts.messages import parse_arguments
from astuner.contracts.types import Task

P = TypeVar("P", bound="Params")

BAND = 1_000_000
"""Number of seeds per split."""
SPLITS = ("train", "validation", "test")
"""Splits in the order of their seeds: 0 to 999999 is train, and so on."""
LISTED = {"train": 10_000, "validation": 256, "test": 256}
"""Default number of listed tasks per split."""
TASK_IDS = f"NAME:SEED; train has {BAND} seeds from 0, validation {BAND} from {BAND}, test {BAND} from {2 * BAND}"

_TASK_ID = re.compile(r"([A-Za-z0-9._-]+):(0|[1-9][0-9]{0,6})")


class Params(BaseModel):
    """Parameters of an environment and their defaults; `describe` returns their docstrings."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)

    tasks: int = Field(0, ge=0, le=BAND)
    """number of tasks per split; 0: 10000 for train, 256 for the others"""

    @classmethod
    def of(cls: type[P], given: Mapping[str, Any]) -> P:
        """Return the validated parameters.

        :raises ValueError: A name is unknown or a value is invalid; the message is one line.
        """
        try:
            return cls(**given)
        except ValidationError as e:
            raise ValueError("; ".join(cls._sentence(problem) for problem in e.errors())) from None

    @classmethod
    def _sentence(cls, problem: Any) -> str:
        name = ".".join(map(str, problem["loc"]))
        if problem["type"] == "extra_forbidden":
            return f"unknown parameter {name!r}; known parameters: {', '.join(sorted(cls.model_fields))}"
        if problem["type"] == "value_error":
            return str(problem["ctx"]["error"])
        must = problem["msg"].replace("Input should", "it must")
        meaning = cls.model_fields[str(problem["loc"][0])].description
        return f"the parameter {name!r} is {problem['input']!r}; {must} ({meaning})"

    @property
    def names(self) -> Sequence[str]:
        """Names before the seed in the IDs of the listed tasks, in turn."""
        raise NotImplementedError(f"{type(self).__name__}.names must return the names in task IDs, such as ['4x4']")


class ProceduralWorld(Environment):
    """Environment with generated tasks and a maximum number of steps."""

    kind: ClassVar[type[Params]]
    named: ClassVar[str]
    """Meaning of the name in a task ID."""

    def __init__(self, params: Mapping[str, Any] | None = None) -> None:
        super().__init__(params)
        self._settings: Any = self.kind.of(self.params)
        self._is_reset = self._is_done = False
        self._steps = 0

    @classmethod
    def tasks(cls, split: str, params: Mapping[str, Any]) -> Iterable[Task]:
        settings = cls.kind.of(params)
        return list_tasks(settings.names, split, settings.tasks)

    @classmethod
    def warm(cls) -> None:
        """Reset an environment once before the instances are forked, to share the cost of the first reset."""
        for name in cls.kind().names:
            cls().reset(Task(task_id=f"{name}:0"))

    def reset(self, task: Task) -> StepResult:
        name, seed = parse_task_id(task.task_id)
        self._steps, self._is_done = 0, False
        first = self._begin(name, seed)
        self._is_reset = True
        return first

    def step(self, action: Mapping[str, Any]) -> StepResult:
        if not self._is_reset:
            raise RuntimeError("step before reset")
        observation, reward = "It is over.", 0.0
        if not self._is_over:
            self._steps += 1
            observation, reward = self._act(action)
        return StepResult(
            observation=observation,
            reward=reward,
            terminated=self._is_done,
            truncated=self._is_over and not self._is_done,
            info=self._info(),
        )

    def describe(self) -> Mapping[str, Any]:
        return {
            **self._about(),
            "tasks": TASK_IDS.replace("NAME", self.named),
            "splits": list(SPLITS),
            "params": {
                name: {"meaning": field.description, "value": getattr(self._settings, name)}
                for name, field in self.kind.model_fields.items()
            },
        }

    @abstractmethod
    def _begin(self, name: str, seed: int) -> StepResult:
        """Start the task with this name and seed; raise a ValueError if it does not exist."""

    @abstractmethod
    def _act(self, action: Mapping[str, Any]) -> tuple[str, float]:
        """Execute an action, set `_is_done`, and return the observation and the reward."""

    @abstractmethod
    def _about(self) -> dict[str, Any]:
        """Return what `describe` adds to the tasks, splits and parameters."""

    @property
    def _most_steps(self) -> int:
        return int(self._settings.max_steps)

    @property
    def _is_over(self) -> bool:
        return self._is_done or self._steps >= self._most_steps

    def _info(self) -> dict[str, Any]:
        return {"steps": self._steps}


def list_tasks(names: Sequence[str], split: str, limit: int) -> Iterator[Task]:
    """Return the first tasks of a split, with the names in turn.

    :param limit: Number of tasks; 0 selects the default of the split.
    :raises ValueError: The split does not exist.
    """
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; known splits: {', '.join(SPLITS)}")
    first = SPLITS.index(split) * BAND
    return (Task(task_id=f"{names[n % len(names)]}:{first + n}") for n in range(limit or LISTED[split]))


def parse_task_id(task_id: str) -> tuple[str, int]:
    """Return the name and the seed of a task.

    :raises ValueError: The ID is invalid.
    """
    match = _TASK_ID.fullmatch(task_id)
    if match is None or int(match[2]) >= len(SPLITS) * BAND:
        raise ValueError(f"unknown task {task_id!r}; task IDs: {TASK_IDS}")
    return match[1], int(match[2])


def split_of(seed: int) -> str:
    """Return the split of a seed."""
    return SPLITS[seed // BAND]


def text_of(action: Mapping[str, Any]) -> str:
    """Return the text of a message; for a list of parts, the text parts."""
    content = action.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        return ""
    parts = [part.get("text") for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
    return "\n".join(text for text in parts if isinstance(text, str))


def calls_of(action: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the tool calls of a message as (name, arguments); invalid arguments are empty."""
    given = action.get("tool_calls")
    if not isinstance(given, Sequence) or isinstance(given, str):
        return []
    return [_call(call) for call in given]


def _call(call: Any) -> tuple[str, dict[str, Any]]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return "", {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = parse_arguments(arguments)
    return str(function.get("name", "")), dict(arguments) if isinstance(arguments, Mapping) else {}


def tool(name: str, description: str, argument: str, meaning: Mapping[str, Any]) -> dict[str, Any]:
    """Return an OpenAI-style description of a tool with one argument.

    :param meaning: JSON schema of the argument.
    """
    parameters = {"type": "object", "properties": {argument: dict(meaning)}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}
