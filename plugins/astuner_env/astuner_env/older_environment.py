"""Classes written for the older environment service, as an `Environment`.

They have ``get_init_state``, ``step``, ``evaluate``, ``get_info``, ``close`` and ``get_query_list``, take
``(task_id, instance_id, params)``, and their files import ``BaseEnv`` and ``Registry`` from ``env_service``.  Such a
file runs as it is: `adapt` wraps the class, and `stand_in` answers for the two imports where nothing else does.

Standard library only: the service lends this module to interpreters that have nothing of ASTuner's installed.

What the older kind says, in a class or over the wire, is read in one way: strict where a number decides something (a
reward, a score, whether it is over), lenient where only a spelling differs: a state is a text, a message, or a list of
messages, a score a number or a report.

Invariant: what is missing or no number raises `NotUnderstood`; nothing is filled in.
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
    """It is not what was to be said; says what is wrong with it."""


def started(said: Any) -> StepResult:
    """The beginning of an episode; it has a reward, or is over, only where that is said."""
    fields = _fields(said)
    return _result(fields, reward=fields.get("reward", 0.0), is_over=fields.get("is_terminated", False))


def stepped(said: Any) -> StepResult:
    """The answer to an action."""
    fields = _fields(said)
    for name in ("reward", "is_terminated"):
        if name not in fields:
            raise NotUnderstood(f"a step's answer has no {name}: {shown(said)}")
    return _result(fields, reward=fields["reward"], is_over=fields["is_terminated"])


def data_of(answer: Any) -> Any:
    """The ``data`` of a successful answer."""
    if not isinstance(answer, Mapping) or "success" not in answer:
        raise NotUnderstood(f"the answer has no field success: {shown(answer)}")
    if answer["success"] is not True:
        raise NotUnderstood(f"the service says that it failed, and not why: {shown(answer)}")
    return answer.get("data")


def evaluated(data: Any) -> Evaluation | dict[str, Any]:
    """What ``/evaluate`` answers: a number, or a report with a ``score``; a report without one as it is."""
    if not isinstance(data, Mapping):
        return Evaluation(score=number("the score", data))
    if "score" not in data:
        return dict(data)
    success, details = data.get("success"), data.get("details")
    if success is not None and not isinstance(success, bool):
        raise NotUnderstood(f"success is {shown(success)}; it must be true, false or null")
    if details is not None and not isinstance(details, Mapping):
        raise NotUnderstood(f"the details are {shown(details)}; they must be an object")
    return Evaluation(score=number("the score", data["score"]), success=success, details=dict(details or {}))


def params_for(task: Task, params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of an episode, with what the data set knows of the task beside its id, where that is anything."""
    known = {"main_query": task.main_query, "metadata": dict(task.metadata)}
    known = {name: value for name, value in known.items() if value}
    return {**params, **({"task": known} if known else {})}


def task_ids(data: Any) -> list[str]:
    """What ``/get_env_profile`` answers; some services have numbers for ids."""
    if not isinstance(data, list) or not all(isinstance(i, (str, int)) and not isinstance(i, bool) for i in data):
        raise NotUnderstood(f"the tasks are {shown(data)}; they must be a list of ids")
    return [str(i) for i in data]


def shown_text(text: Any) -> str:
    """What the service says about itself, not endlessly."""
    return "" if text is None else str(text)[:2000]


def number(what: str, value: Any) -> float:
    """``value`` as a finite float."""
    if (found := as_float(value)) is not None:
        return found
    raise NotUnderstood(f"{what} is {shown(value)}; it must be a finite number")


def shown(value: Any) -> str:
    """The beginning of a value, for a message."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _fields(said: Any) -> Mapping[str, Any]:
    if not isinstance(said, Mapping) or "state" not in said:
        raise NotUnderstood(f"the answer has no state: {shown(said)}")
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
        raise NotUnderstood(f"the state is {shown(state)}; it must be messages")
    return tuple(_message(message) for message in messages)


def _message(message: Any) -> Mapping[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
        raise NotUnderstood(f"a message is {shown(message)}; it must have a role and a content")
    _text(message["content"])
    # Every message of the reference has the key; an empty list would change how a chat template shows it.
    return {name: value for name, value in message.items() if name != "tool_calls" or value}


def _observation(messages: Sequence[Mapping[str, Any]]) -> str:
    """What is new to the agent: everything but a system prompt."""
    said = [m for m in messages if m["role"] != "system"] or messages
    return "\n".join(_text(m["content"]) for m in said)


def _text(content: Any) -> str:
    try:
        return text_of(content)
    except UnsupportedRequest as e:
        raise NotUnderstood(str(e)) from None


T = TypeVar("T")

METHODS = ("get_init_state", "step", "evaluate", "get_query_list")
"""What makes a class one of these."""


def is_older(found: Any) -> bool:
    """Whether ``found`` is a class written for the older service."""
    return (
        isinstance(found, type)
        and not issubclass(found, Environment)
        and all(callable(getattr(found, name, None)) for name in METHODS)
    )


@cache
def adapt(cls: type) -> type[Environment]:
    """The `Environment` that ``cls`` is, or that runs one of the older kind; the same one every time.

    :raises TypeError: it is neither.
    """
    if issubclass(cls, Environment):
        return cls
    if not is_older(cls):
        missing = [name for name in METHODS if not callable(getattr(cls, name, None))]
        raise TypeError(f"{cls.__name__} is no subclass of astuner.Environment, nor an older one: no {missing[0]}")
    names = {"older": cls, "__module__": cls.__module__, "__doc__": cls.__doc__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (OlderEnvironment,), names)


class OlderEnvironment(Environment):
    """Runs an instance of `older`."""

    older: type

    def __init__(self, params: Mapping[str, Any] | None = None) -> None:
        super().__init__(params)
        self._inner: Any = None

    @classmethod
    def tasks(cls, split: str, params: Mapping[str, Any]) -> Iterator[Task]:
        """The ids of ``get_query_list``, which some versions give only the split."""
        listed = getattr(cls.older, "get_query_list")  # noqa: B009  (it is no attribute of every type)
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
        """Its dense score; where that is a report without one, whether it says that the episode succeeded."""
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
    """Call with as many of the arguments as it takes; classes differ in whether they take ``params``."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # of C
        return function(*arguments)
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return function(*arguments)
    takes = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return function(*arguments[: len(takes)])


def _read(method: str, read: Callable[[Any], T], said: Any) -> T:
    """What ``said`` means; a `TypeError` names the method that said it."""
    try:
        return read(said)
    except NotUnderstood as e:
        raise TypeError(f"{method} of an older environment: {e}") from None


_score = partial(number, "the score")


# ------------------------------------------------------------------------------------------------- what they import


def stand_in() -> None:
    """From now on ``env_service.base.BaseEnv`` and ``env_service.registry.Registry`` can be imported.

    Where a real ``env_service`` is importable, that one is taken.
    """
    if not any(isinstance(finder, _StandIns) for finder in sys.meta_path):
        sys.meta_path.append(_StandIns())  # last: everything real comes first


class BaseEnv:
    """What their classes inherit from: nothing is needed of it."""


class Registry:
    """What their files note a class in."""

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
    """Finds and loads the stand-ins; asked only when nothing else was found."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name not in _STAND_INS:
            return None
        return importlib.machinery.ModuleSpec(name, self, origin="astuner", is_package=name == "env_service")

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module).update(_STAND_INS[module.__name__])
