"""`check_environment`: does an environment keep to the contract of `astuner.Environment`?"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

from astuner.environment import StepResult
from astuner.testing._run import is_finite_number
from astuner.types import Split, Task

Action = Mapping[str, Any]


def check_environment(
    env_cls: Any,
    *,
    params: Mapping[str, Any] | None = None,
    config: Any = None,
    act: Callable[[str], Action] | None = None,
    steps: int = 3,
    split: Split = Split.TRAIN,
) -> None:
    """Check one environment on its first task.

    - ``tasks`` yields tasks, the same ones every time;
    - ``reset`` and ``step`` return a `StepResult` with text and JSON data, also for an action that makes no sense;
    - ``evaluate`` is a finite number and changes nothing;
    - two instances do not disturb each other; ``close`` may be called after a failure and twice.

    :param act: chooses an action (an OpenAI-style assistant message) for an observation; None always says hello.
    """
    act = act or _say_hello
    name = env_cls.__name__
    tasks = list(islice(env_cls.tasks(split, params or {}), 5))
    assert tasks, f"{name}.tasks yields no task for the split {split.value}"
    assert all(isinstance(t, Task) for t in tasks), f"{name}.tasks must yield astuner.Task, not {tasks!r}"
    again = list(islice(env_cls.tasks(split, params or {}), 5))
    assert tasks == again, f"{name}.tasks gave other tasks the second time; keep a stable order"
    task, alone = tasks[0], []
    for other in (None, env_cls(config)):  # the second time with another instance in step
        env = env_cls(config)
        try:
            if other is not None:
                other.reset(tasks[-1])
            seen = [_check_result(f"{name}.reset", env.reset(task))]
            for _ in range(steps):
                if seen[-1].terminated or seen[-1].truncated:
                    break
                if other is not None:
                    other.step(act(""))
                seen.append(_check_result(f"{name}.step", env.step(act(seen[-1].observation))))
                _check_evaluate(name, env)
            _check_json(f"{name}.describe", dict(env.describe()))
        finally:
            env.close()
            env.close()
            if other is not None:
                other.close()
        alone.append([s.observation for s in seen])
    assert alone[0] == alone[1], (
        f"{name} answered {alone[1]} beside another instance, but {alone[0]} alone; keep the world's state on self"
    )
    env = env_cls(config)
    try:
        env.reset(task)
        _check_result(f"{name}.step with an empty action", env.step({"role": "assistant", "content": ""}))
    finally:
        env.close()
    env_cls(config).close()  # never reset: a failed start is closed too


def _say_hello(observation: str) -> Action:
    return {"role": "assistant", "content": "hello"}


def _check_result(where: str, result: Any) -> StepResult:
    assert isinstance(result, StepResult), f"{where} returned {result!r}; return StepResult(observation=…)"
    assert isinstance(result.observation, str), f"{where}: the observation is {result.observation!r}; it must be text"
    assert is_finite_number(result.reward), f"{where}: the reward {result.reward} is not a finite number"
    _check_json(f"{where}: info", dict(result.info))
    return result


def _check_evaluate(name: str, env: Any) -> None:
    score = env.evaluate()
    assert is_finite_number(score), f"{name}.evaluate returned {score!r}, not a finite number"
    again = env.evaluate()
    assert score == again, f"{name}.evaluate gave {score} and then {again}; it must not change the world"


def _check_json(where: str, data: Any) -> None:
    try:
        json.dumps(data)
    except (TypeError, ValueError) as e:
        raise AssertionError(f"{where} does not fit into JSON: {e}") from e
