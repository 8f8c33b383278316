"""What the worlds share whose tasks are made from a seed: ``name:seed``, where the seed's million says which split.

And what a model said: text and tool calls, read out of an assistant message in which anything may be.

Invariant: the seeds of two splits are disjoint, so no task of one split is in another.
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
"""How many seeds each split has."""
SPLITS = ("train", "validation", "test")
"""In the order of their bands: 0 to 999999 is train, and so on."""
LISTED = {"train": 10_000, "validation": 256, "test": 256}
"""How many tasks a split lists, if the parameter ``tasks`` does not say."""
TASK_IDS = (
    f"NAME:SEED; train has the seeds from 0, validation those from {BAND}, test those from {2 * BAND}, {BAND} each"
)

_TASK_ID = re.compile(r"([A-Za-z0-9._-]+):(0|[1-9][0-9]{0,6})")


class Params(BaseModel):
    """The parameters of a world and their defaults; the sentence under each is what `describe` says of it."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)

    tasks: int = Field(0, ge=0, le=BAND)
    """how many tasks a split lists; 0: train 10000, the others 256"""

    @classmethod
    def of(cls: type[P], given: Mapping[str, Any]) -> P:
        """:raises ValueError: an unknown name, or a value that cannot be; in one line."""
        try:
            return cls(**given)
        except ValidationError as e:
            raise ValueError("; ".join(cls._sentence(problem) for problem in e.errors())) from None

    @classmethod
    def _sentence(cls, problem: Any) -> str:
        name = ".".join(map(str, problem["loc"]))
        if problem["type"] == "extra_forbidden":
            return f"there is no parameter {name!r}; there are {', '.join(sorted(cls.model_fields))}"
        if problem["type"] == "value_error":
            return str(problem["ctx"]["error"])
        must = problem["msg"].replace("Input should", "it must")
        meaning = cls.model_fields[str(problem["loc"][0])].description
        return f"the parameter {name!r} is {problem['input']!r}; {must} ({meaning})"

    @property
    def names(self) -> Sequence[str]:
        """What is before the seed in the ids of the tasks that are listed, in turn."""
        raise NotImplementedError(f"{type(self).__name__}.names returns what is before the seed in ids, as ['4x4']")


class ProceduralWorld(Environment):
    """A world whose episode is over when it says so, or after so many steps."""

    kind: ClassVar[type[Params]]
    named: ClassVar[str]
    """What the name in a task's id is."""

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
        """What every instance would do first, done once before they are forked."""
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
        """Begin the task of this name and seed; a ValueError says that there is none."""

    @abstractmethod
    def _act(self, action: Mapping[str, Any]) -> tuple[str, float]:
        """Act while it is not over: what is seen then, and the reward; sets `_is_done`."""

    @abstractmethod
    def _about(self) -> dict[str, Any]:
        """What `describe` says beside the tasks, splits and parameters."""

    @property
    def _most_steps(self) -> int:
        return int(self._settings.max_steps)

    @property
    def _is_over(self) -> bool:
        return self._is_done or self._steps >= self._most_steps

    def _info(self) -> dict[str, Any]:
        return {"steps": self._steps}


def list_tasks(names: Sequence[str], split: str, limit: int) -> Iterator[Task]:
    """The first tasks of a split, the names in turn.

    :param limit: how many; 0 takes the split's usual number.
    :raises ValueError: there is no such split.
    """
    if split not in SPLITS:
        raise ValueError(f"there is no split {split!r}; there are {', '.join(SPLITS)}")
    first = SPLITS.index(split) * BAND
    return (Task(task_id=f"{names[n % len(names)]}:{first + n}") for n in range(limit or LISTED[split]))


def parse_task_id(task_id: str) -> tuple[str, int]:
    """Name and seed of a task.

    :raises ValueError: it is not such an id.
    """
    match = _TASK_ID.fullmatch(task_id)
    if match is None or int(match[2]) >= len(SPLITS) * BAND:
        raise ValueError(f"there is no task {task_id!r}; a task is {TASK_IDS}")
    return match[1], int(match[2])


def split_of(seed: int) -> str:
    """The split that a task's seed belongs to."""
    return SPLITS[seed // BAND]


def text_of(action: Mapping[str, Any]) -> str:
    """The message's text; of a list of parts, the text parts."""
    content = action.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        return ""
    parts = [part.get("text") for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
    return "\n".join(text for text in parts if isinstance(text, str))


def calls_of(action: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The message's tool calls as (name, arguments); arguments that cannot be read are none."""
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
    """An OpenAI-style description of a tool with one argument.

    :param meaning: the argument's JSON schema.
    """
    parameters = {"type": "object", "properties": {argument: dict(meaning)}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}
