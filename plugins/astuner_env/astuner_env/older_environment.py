"""Run classes written for the older environment service as an `Environment`.

These classes have ``get_init_state``, ``step``, ``evaluate``, ``get_info``, ``close`` and ``get_query_list``, take
``(task_id, instance_id, params)``, and import ``BaseEnv`` and ``Registry`` from ``env_service``. Their files run
unchanged: `adapt` wraps the class, and `stand_in` provides the two imports if no real package does.

This module uses only the standard library, because the service loads it in interpreters without ASTuner's packages.

Answers of such classes, and of older services over HTTP, are parsed in one way. Values that decide something (reward,
score, end of the episode) are checked strictly. Other forms are accepted leniently: a state may be a string, a message
or a list of messages; a score may be a number or a report.

Invariant: a missing or non-numeric value raises `NotUnderstood`; nothing is filled in.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import inspect
import sys
import types
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, ClassVar, TypeVar

from astuner.contracts.environment import Environment, Evaluation, StepResult
from astuner.contracts.errors import UnsupportedRequest
from astuner.contracts.messages import text_of
from astuner.contracts.scalars import as_float
from astuner.contracts.types import Task

_SHOWN = 200


class NotUnderstood(ValueError):
    """Raised for an answer in an unexpected form; the message describes the problem."""


def started(said: Any) -> StepResult:
    """Parse the start of an episode. Reward and end are optional."""
    fields = _fields(said)
    return _result(fields, reward=fields.get("reward", 0.0), is_over=fields.get("is_terminated", False))


def stepped(said: Any) -> StepResult:
    """Parse the answer to an action."""
    fields = _fields(said)
    for name in ("reward", "is_terminated"):
        if name not in fields:
            raise NotUnderstood(f"the answer of step lacks {name}: {shown(said)}")
    return _result(fields, reward=fields["reward"], is_over=fields["is_terminated"])


def data_of(answer: Any) -> Any:
    """Return the ``data`` of a successful answer."""
    if not isinstance(answer, Mapping) or "success" not in answer:
        raise NotUnderstood(f"the answer lacks the field success: {shown(answer)}")
    if answer["success"] is not True:
        raise NotUnderstood(f"the service reported a failure without a reason: {shown(answer)}")
    return answer.get("data")


def evaluated(data: Any) -> Evaluation | dict[str, Any]:
    """Parse the answer of ``/evaluate``: a number or a report with a ``score``. Return other reports unchanged."""
    if not isinstance(data, Mapping):
        return Evaluation(score=number("the score", data))
    if "score" not in data:
        return dict(data)
    success, details = data.get("success"), data.get("details")
    if success is not None and not isinstance(success, bool):
        raise NotUnderstood(f"success is {shown(success)}; it must be true, false or null")
    if details is not None and not isinstance(details, Mapping):
        raise NotUnderstood(f"details is {shown(details)}; it must be an object")
    return Evaluation(score=number("the score", data["score"]), success=success, details=dict(details or {}))


def params_for(task: Task, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of an episode, plus the task's query and metadata if there are any."""
    known = {"main_query": task.main_query, "metadata": dict(task.metadata)}
    known = {name: value for name, value in known.items() if value}
    return {**params, **({"task": known} if known else {})}


def task_ids(data: Any) -> list[str]:
    """Parse the answer of ``/get_env_profile``; some services use numbers as IDs."""
    if not isinstance(data, list) or not all(isinstance(i, (str, int)) and not isinstance(i, bool) for i in data):
        raise NotUnderstood(f"the task list is {shown(data)}; it must be a list of IDs")
    return [str(i) for i in data]


def shown_text(text: Any) -> str:
    """Return at most 2,000 characters of a service's message."""
    return "" if text is None else str(text)[:2000]


def number(what: str, value: Any) -> float:
    """Return ``value`` as a finite float."""
    if (found := as_float(value)) is not None:
        return found
    raise NotUnderstood(f"{what} is {shown(value)}; it must be a finite number")


def shown(value: Any) -> str:
    """Return the beginning of a value's representation, for a message."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _fields(said: Any) -> Mapping[str, Any]:
    if not isinstance(said, Mapping) or "state" not in said:
        raise NotUnderstood(f"the answer lacks the field state: {shown(said)}")
    return said


def _result(fields: Mapping[str, Any], *, reward: Any, is_over: Any) -> StepResult:
    info = fields.get("info")
    info = {} if info is None else info
    if not isinstance(info, Mapping):
        raise NotUnderstood(f"info is {shown(info)}; it must be an object")
    if not isinstance(is_over, bool):
        raise NotUnderstood(f"is_terminated is {shown(is_over)}; it must be true or false")
    messages = _messages(fields["state"])
    truncated = is_over and info.get("truncated") is True
    observation = fields.get("observation")
    return StepResult(
        observation=observation if isinstance(observation, str) else _observation(messages),
        reward=number("the reward", reward),
        terminated=is_over and (not truncated or info.get("terminated") is True),
        truncated=truncated,
        info=dict(info),
        messages=messages,
    )


def _messages(state: Any) -> tuple[Mapping[str, Any], ...]:
    if isinstance(state, str):
        return ({"role": "user", "content": state},)
    messages = [state] if isinstance(state, Mapping) else state
    if not isinstance(messages, Sequence) or not messages:
        raise NotUnderstood(f"the state is {shown(state)}; it must be a message or a list of messages")
    return tuple(_message(message) for message in messages)


def _message(message: Any) -> Mapping[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
        raise NotUnderstood(f"a message is {shown(message)}; it must have a role and content")
    _text(message["content"])
    # Older services always send tool_calls; an empty list would change the output of a chat template.
    return {name: value for name, value in message.items() if name != "tool_calls" or value}


def _observation(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text that is new to the agent: all messages except system prompts."""
    said = [m for m in messages if m["role"] != "system"] or messages
    return "\n".join(_text(m["content"]) for m in said)


def _text(content: Any) -> str:
    try:
        return text_of(content)
    except UnsupportedRequest as e:
        raise NotUnderstood(str(e)) from None


T = TypeVar("T")

METHODS = ("get_init_state", "step", "evaluate", "get_query_list")
"""Methods that identify a class for the older service."""


def is_older(found: Any) -> bool:
    """Return whether ``found`` is a class written for the older service."""
    return (
        isinstance(found, type)
        and not issubclass(found, Environment)
        and all(callable(getattr(found, name, None)) for name in METHODS)
    )


@cache
def adapt(cls: type) -> type[Environment]:
    """Return ``cls`` if it is an `Environment`, or a cached subclass that runs an older class.

    :raises TypeError: It is neither.
    """
    if issubclass(cls, Environment):
        return cls
    if not is_older(cls):
        missing = [name for name in METHODS if not callable(getattr(cls, name, None))]
        raise TypeError(f"{cls.__name__} is not a subclass of astuner.Environment and lacks {missing[0]}")
    names = {"older": cls, "__module__": cls.__module__, "__doc__": cls.__doc__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (OlderEnvironment,), names)


class OlderEnvironment(Environment):
    """Environment that runs an instance of `older`."""

    older: type

    def __init__(self, params: Mapping[str, Any] | None = None) -> None:
        super().__init__(params)
        self._inner: Any = None

    @classmethod
    def tasks(cls, split: str, params: Mapping[str, Any]) -> Iterator[Task]:
        """Yield the IDs from ``get_query_list``, which takes only the split in some versions."""
        listed = getattr(cls.older, "get_query_list")  # noqa: B009  (not an attribute of every type)
        for task_id in _call(listed, split, dict(params)):
            yield Task(task_id=str(task_id))

    def reset(self, task: Task) -> StepResult:
        self.close()
        params = params_for(task, self.params)
        self._inner = _call(self.older, task.task_id, uuid.uuid4().hex, params)
        return _read("get_init_state", started, _call(self._inner.get_init_state, params))

    def step(self, action: Mapping[str, Any]) -> StepResult:
        return _read("step", stepped, _call(self._inner.step, dict(action), {}))

    def evaluate(self) -> Evaluation:
        """Return the dense score; for a report without a score, use the sparse score."""
        found = _call(self._inner.evaluate, {}, {"sparse": False})
        if not isinstance(found, Mapping):
            return Evaluation(score=_read("evaluate", _score, found))
        if "score" in found:
            details = {name: value for name, value in found.items() if name != "score"}
            return Evaluation(score=_read("evaluate", _score, found["score"]), details=details)
        sparse = _call(self._inner.evaluate, {}, {"sparse": True})
        return Evaluation(score=_read("evaluate with sparse", _score, sparse), details=dict(found))

    def describe(self) -> Mapping[str, Any]:
        if not hasattr(self._inner, "get_info"):
            return {}
        found = _call(self._inner.get_info, {}, {})
        return found if isinstance(found, Mapping) else {"info": found}

    def close(self) -> None:
        inner, self._inner = self._inner, None
        if inner is not None and hasattr(inner, "close"):
            inner.close()


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function with as many arguments as it accepts; not all classes accept ``params``."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # implemented in C
        return function(*arguments)
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return function(*arguments)
    takes = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return function(*arguments[: len(takes)])


def _read(method: str, read: Callable[[Any], T], said: Any) -> T:
    """Parse an answer; raise a `TypeError` that names the method."""
    try:
        return read(said)
    except NotUnderstood as e:
        raise TypeError(f"{method} of an older environment: {e}") from None


_score = partial(number, "the score")


# --------------------------------------------------------------------------------------------- replacement modules


def stand_in() -> None:
    """Make ``env_service.base.BaseEnv`` and ``env_service.registry.Registry`` importable.

    A real ``env_service`` package takes precedence.
    """
    if not any(isinstance(finder, _StandIns) for finder in sys.meta_path):
        sys.meta_path.append(_StandIns())  # last, so that real packages take precedence


class BaseEnv:
    """Empty base class for older environments."""


class Registry:
    """Registry that older environments register their class in."""

    _classes: ClassVar[dict[str, type]] = {}

    @classmethod
    def register(cls, name: str) -> Callable[[type], type]:
        def note(env_class: type) -> type:
            cls._classes[name] = env_class
            return env_class

        return note

    @classmethod
    def get(cls, name: str) -> type:
        if name not in cls._classes:
            raise ValueError(f"Environment {name} not found in registry")
        return cls._classes[name]

    @classmethod
    def list_envs(cls) -> list[str]:
        return list(cls._classes)


_STAND_INS: dict[str, dict[str, Any]] = {
    "env_service": {},
    "env_service.base": {"BaseEnv": BaseEnv},
    "env_service.registry": {"Registry": Registry},
}


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finder and loader of the replacement modules; used only if no real module was found."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name not in _STAND_INS:
            return None
        return importlib.machinery.ModuleSpec(name, self, origin="astuner", is_package=name == "env_service")

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module).update(_STAND_INS[module.__name__])
