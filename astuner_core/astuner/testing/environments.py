"""`check_environment`: does an environment keep to the contract of `astuner.Environment`?"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, TypeVar

from astuner.contracts.environment import Environment, Evaluation, StepResult
from astuner.contracts.types import Task
from astuner.plugins import registry
from astuner.plugins.loader import load_plugins
from astuner.plugins.user_code import place
from astuner.testing._run import is_finite_number

T = TypeVar("T")
Action = Mapping[str, Any]

_NOWHERE = "no-such-name-anywhere"
_CALL = {"id": "call_1", "type": "function", "function": {"name": _NOWHERE, "arguments": "{"}}
NONSENSE: tuple[Action, ...] = (
    {"role": "assistant", "content": ""},
    {"role": "assistant", "content": "\x00\ufffd" * 50},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
)
"""Actions that make no sense anywhere."""


def check_environment(
    env_cls: Any,
    *,
    params: Mapping[str, Any] | None = None,
    act: Callable[[str], Action] | None = None,
    steps: int = 3,
    split: str = "train",
) -> None:
    """Check one environment on its first task.

    - ``tasks`` yields tasks with different ids, the same ones every time, and refuses an unknown split with
      `ValueError`;
    - ``reset`` takes a task by its id alone, and refuses an unknown one with `ValueError`;
    - ``reset`` and ``step`` return a `StepResult` with text and JSON data, also for actions that make no sense;
    - ``evaluate`` is a finite number or an `Evaluation`, and changes nothing;
    - two instances do not disturb each other; ``close`` may be called after a failure and twice.

    :param params: what an experiment writes as ``astuner.env_service.params``.
    :param act: chooses an action (an OpenAI-style assistant message) for an observation; None always says hello.
    :param split: one of its splits.
    """
    act, params = act or _say_hello, dict(params or {})
    name = env_cls.__name__
    env_cls = _of_today(env_cls)
    task, last = _check_tasks(name, env_cls, params, split)
    alone = []
    for other in (None, _call(name, env_cls, params)):  # the second time with another instance in step
        env = _call(name, env_cls, params)
        try:
            if other is not None:
                _call(f"{name}.reset", other.reset, last)
            seen = [_check_result(f"{name}.reset", _call(f"{name}.reset", env.reset, task))]
            for _ in range(steps):
                if seen[-1].is_over:
                    break
                if other is not None:
                    _call(f"{name}.step", other.step, act(""))
                action = act(seen[-1].observation)
                seen.append(_check_result(f"{name}.step", _call(f"{name}.step", env.step, action)))
                _check_evaluate(name, env)
            _check_json(f"{name}.describe", dict(_call(f"{name}.describe", env.describe)))
        finally:
            for each in (env, env, *([] if other is None else [other])):
                _call(f"{name}.close", each.close)
        alone.append([s.observation for s in seen])
    assert alone[0] == alone[1], (
        f"{name} answered {alone[1]} beside another instance, but {alone[0]} alone; keep the world's state on self"
    )
    _check_start_by_id(name, env_cls, params, task, alone[0][0])
    for action in NONSENSE:
        _check_nonsense(name, env_cls(params), task, action)
    env_cls(params).close()  # never reset: a failed start is closed too


def _of_today(env_cls: type) -> type[Environment]:
    """The class itself, or what runs one that was written for an older service."""
    if issubclass(env_cls, Environment):
        return env_cls
    wanted_by = f"{env_cls.__name__}, which is no subclass of astuner.Environment,"
    environments = registry.part(load_plugins(), "environments", wanted_by=wanted_by)()
    adapted: type[Environment] | None = environments.adapt(env_cls)
    assert adapted is not None, (
        f"{env_cls.__name__} is no subclass of astuner.Environment, nor written for an older environment service"
    )
    return adapted


def _call(what: str, function: Callable[..., T], *arguments: Any) -> T:
    """What ``function`` returns, in an environment that works."""
    try:
        return function(*arguments)
    except Exception as e:
        raise AssertionError(f"{what} raised {type(e).__name__}: {e}{place(e, caller=__file__)}") from e


def _check_tasks(name: str, env_cls: type[Environment], params: Mapping[str, Any], split: str) -> tuple[Task, Task]:
    """The first task, and another where there is one."""
    tasks = _call(f"{name}.tasks", lambda: list(islice(env_cls.tasks(split, params), 5)))
    assert tasks, f"{name}.tasks yields no task for the split {split!r}"
    assert all(isinstance(t, Task) for t in tasks), f"{name}.tasks must yield astuner.Task, not {tasks!r}"
    assert len({t.task_id for t in tasks}) == len(tasks), f"{name}.tasks has a task_id twice; they must differ"
    again = _call(f"{name}.tasks", lambda: list(islice(env_cls.tasks(split, params), 5)))
    assert tasks == again, f"{name}.tasks gave other tasks the second time; keep a stable order"
    try:
        found = list(islice(env_cls.tasks(_NOWHERE, params), 1))
    except ValueError:
        return tasks[0], tasks[-1]
    raise AssertionError(
        f"{name}.tasks gave {found} for a split that does not exist; raise ValueError, and say which splits there are"
    )


def _check_start_by_id(
    name: str, env_cls: type[Environment], params: Mapping[str, Any], task: Task, observation: str
) -> None:
    env = env_cls(params)
    try:
        first = env.reset(Task(task_id=task.task_id)).observation
    except Exception as e:
        raise AssertionError(
            f"{name}.reset needs more than the task_id ({type(e).__name__}: {e}); the id may be all that crosses the "
            "wire, so make the rest from it"
        ) from e
    finally:
        env.close()
    assert first == observation, f"{name}.reset showed {first!r} for the bare task_id, and {observation!r} for the task"
    env = env_cls(params)
    try:
        env.reset(Task(task_id=_NOWHERE))
    except ValueError:
        return
    finally:
        env.close()
    raise AssertionError(f"{name}.reset started a task that does not exist; raise ValueError")


def _check_nonsense(name: str, env: Environment, task: Task, action: Action) -> None:
    try:
        env.reset(task)
        result = env.step(action)
    except Exception as e:
        raise AssertionError(
            f"{name}.step raised {type(e).__name__}: {e} for {action}; a model may say anything, so answer with an "
            "observation"
        ) from e
    finally:
        env.close()
    _check_result(f"{name}.step with an action that makes no sense", result)


def _say_hello(observation: str) -> Action:
    return {"role": "assistant", "content": "hello"}


def _check_result(where: str, result: Any) -> StepResult:
    assert isinstance(result, StepResult), f"{where} returned {result!r}; return StepResult(observation=…)"
    assert isinstance(result.observation, str), f"{where}: the observation is {result.observation!r}; it must be text"
    assert is_finite_number(result.reward), f"{where}: the reward {result.reward} is not a finite number"
    for flag in (result.terminated, result.truncated):
        assert isinstance(flag, bool), f"{where}: terminated and truncated must be True or False, not {flag!r}"
    for message in result.messages:
        assert isinstance(message.get("role"), str), f"{where}: the message {message!r} has no role"
        assert "content" in message, f"{where}: the message {message!r} has no content"
    _check_json(f"{where}: info", dict(result.info))
    _check_json(f"{where}: messages", [dict(message) for message in result.messages])
    return result


def _check_evaluate(name: str, env: Any) -> None:
    found = [_call(f"{name}.evaluate", env.evaluate) for _ in range(2)]
    for each in found:
        score = each.score if isinstance(each, Evaluation) else each
        assert is_finite_number(score), f"{name}.evaluate returned {each!r}, not a finite number or an Evaluation"
    first, second = map(Evaluation.of, found)
    assert first.success in (None, True, False), f"{name}.evaluate: success is {first.success!r}"
    _check_json(f"{name}.evaluate: details", dict(first.details))
    assert first == second, f"{name}.evaluate gave {first} and then {second}; it must not change the world"


def _check_json(where: str, data: Any) -> None:
    try:
        json.dumps(data, allow_nan=False)
    except (TypeError, ValueError) as e:
        raise AssertionError(f"{where} does not fit into JSON: {e}") from e
