"""Give every workflow, judge and environment its own copy of the task.

Invariant: no user code sees the `Task` that the reader yielded. Attempts, retries, later steps, judges and the log
therefore always start from the task of the data set.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any

from astuner.contracts.types import Task, WorkflowTask

_IMMUTABLE = frozenset({str, int, float, bool, bytes, type(None)})


def copy_attempt(attempt: WorkflowTask) -> WorkflowTask:
    """Return the attempt with a copy of its task."""
    return replace(attempt, task=copy_task(attempt.task))


def copy_task(task: Task) -> Task:
    """Return a task of the same class that shares no list, dict or other mutable object with ``task``."""
    return replace(task, **{f.name: copy_data(getattr(task, f.name)) for f in fields(task) if f.init})


def copy_data(value: Any) -> Any:
    """Return a copy of ``value`` that shares only immutable values with it.

    JSON-like data is copied about ten times faster than `copy.deepcopy` does. Objects that cannot be copied, such as
    locks and connections, are shared.
    """
    try:
        return _copy(value, {})
    except RecursionError:  # nested deeper than Python can follow
        return value


def _copy(value: Any, memo: dict[int, Any]) -> Any:
    if type(value) in _IMMUTABLE:
        return value
    if id(value) in memo:
        return memo[id(value)]
    return _COPIERS.get(type(value), _copy_object)(value, memo)


def _copy_dict(value: dict[Any, Any], memo: dict[int, Any]) -> dict[Any, Any]:
    copied: dict[Any, Any] = {}
    memo[id(value)] = copied
    copied.update({k: v if type(v) in _IMMUTABLE else _copy(v, memo) for k, v in value.items()})
    return copied


def _copy_list(value: list[Any], memo: dict[int, Any]) -> list[Any]:
    copied: list[Any] = []
    memo[id(value)] = copied
    copied.extend([v if type(v) in _IMMUTABLE else _copy(v, memo) for v in value])
    return copied


def _copy_tuple(value: tuple[Any, ...], memo: dict[int, Any]) -> tuple[Any, ...]:
    return tuple([v if type(v) in _IMMUTABLE else _copy(v, memo) for v in value])


def _copy_proxy(value: MappingProxyType[Any, Any], memo: dict[int, Any]) -> MappingProxyType[Any, Any]:
    return MappingProxyType({k: _copy(v, memo) for k, v in value.items()})


def _copy_object(value: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except RecursionError:
        raise
    except Exception:  # user classes may raise anything on copying
        return value


_COPIERS: dict[type, Callable[[Any, dict[int, Any]], Any]] = {
    dict: _copy_dict,
    list: _copy_list,
    tuple: _copy_tuple,
    MappingProxyType: _copy_proxy,
}
