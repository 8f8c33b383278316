"""Classes written for the older environment service, as an `Environment`.

They have ``get_init_state``, ``step``, ``evaluate``, ``get_info``, ``close`` and ``get_query_list``, take
``(task_id, instance_id, params)``, and their files import ``BaseEnv`` and ``Registry`` from ``env_service``.  Such a
file runs as it is: `adapt` wraps the class, and `stand_in` answers for the two imports where nothing else does.

Standard library only: the service lends this module to interpreters that have nothing of ASTuner's installed.

Invariant: a number that the class does not give is not made up, and what it says is read as the service's answers are
(`astuner_env.older_state`).
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import inspect
import sys
import types
import uuid
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any, ClassVar, TypeVar

from astuner.contracts.environment import Environment, Evaluation, StepResult
from astuner.contracts.types import Task
from astuner_env.older_state import NotUnderstood, number, started, stepped

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
        params = {**self.params, **({"task": _known(task)} if _known(task) else {})}
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


def _known(task: Task) -> dict[str, Any]:
    """What the data set knows beside the id, for environments whose tasks come from files."""
    known = {"main_query": task.main_query, "metadata": dict(task.metadata)}
    return {name: value for name, value in known.items() if value}


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
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())  # last: everything real comes first


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


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the stand-ins; asked only when nothing else was found."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name not in _STAND_INS:
            return None
        return importlib.machinery.ModuleSpec(name, _Loader(), origin="astuner", is_package=name == "env_service")


class _Loader(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module).update(_STAND_INS[module.__name__])
