"""What a workflow or a judge returned, made ours: checked once, so that nothing behind it has to doubt a number."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from astuner.contracts.errors import JudgeFailed
from astuner.contracts.types import JudgeOutput, WorkflowOutput
from astuner.plugins.user_code import written_at
from astuner.rollout.threads import Misbehaved

T = TypeVar("T")


def as_output(returned: Any) -> WorkflowOutput:
    """Accept our `WorkflowOutput`, one shaped like agentscope.tuner's, or a bare reward (or agents' rewards)."""
    if isinstance(returned, WorkflowOutput):
        output = returned
    elif isinstance(returned, Mapping) or (isinstance(returned, (int, float)) and not isinstance(returned, bool)):
        output = WorkflowOutput(reward=returned)
    elif hasattr(returned, "reward") and hasattr(returned, "response"):
        metrics = getattr(returned, "metrics", None) or {}
        output = WorkflowOutput(reward=returned.reward, response=returned.response, metrics=metrics)
    else:
        raise Misbehaved(f"returned {returned!r}; it must return a WorkflowOutput")
    reward = output.reward
    if isinstance(reward, Mapping):
        return replace(output, reward=_as_rewards(reward), metrics=_as_metrics(output.metrics))
    if reward is not None and not _is_reward(reward):
        raise Misbehaved(f"returned the reward {reward!r}; it must be a finite number, or None to ask the judge")
    return replace(output, reward=None if reward is None else float(reward), metrics=_as_metrics(output.metrics))


def checked(read: Callable[[Any], T], answer: Any, by: Any) -> T:
    """What ``read`` makes of an answer; where it refuses that, it says where ``by``, which gave it, is written.

    :raises Misbehaved: it is refused.
    """
    try:
        return read(answer)
    except Misbehaved as e:
        at = written_at(by)
        raise Misbehaved(f"{e} ({at} in {by.__name__})" if at else str(e)) from None


def as_verdict(answer: Any) -> JudgeOutput:
    """Accept our `JudgeOutput`, one shaped like it, or the seeds' ``(raw_reward, is_success)``."""
    if isinstance(answer, JudgeOutput):
        return replace(answer, metrics=_as_metrics(answer.metrics))
    if isinstance(answer, tuple) and len(answer) == 2:
        return _verdict(answer[0], None if answer[1] is None else bool(answer[1]), {})
    if hasattr(answer, "reward"):
        return _verdict(answer.reward, None, _as_metrics(getattr(answer, "metrics", None) or {}))
    raise Misbehaved(f"returned {answer!r}; it must return a JudgeOutput")


def as_verdicts(answer: Any, wanted: int) -> list[JudgeOutput | JudgeFailed]:
    """What a group judge says of ``wanted`` attempts."""
    if not isinstance(answer, Sequence) or isinstance(answer, str):
        raise Misbehaved(f"returned {answer!r}; it must return a sequence with a JudgeOutput for each attempt")
    if len(answer) != wanted:
        raise Misbehaved(f"returned {len(answer)} verdicts for {wanted} attempts; it must return one for each")
    return [one if isinstance(one, JudgeFailed) else as_verdict(one) for one in answer]


def _verdict(reward: Any, is_success: bool | None, metrics: Mapping[str, float]) -> JudgeOutput:
    if not isinstance(reward, Mapping) and not _is_reward(reward):
        raise Misbehaved(f"returned the reward {reward!r}; it must be a finite number")
    if isinstance(reward, Mapping):
        return JudgeOutput.per_agent(_as_rewards(reward), is_success=is_success, metrics=metrics)
    return JudgeOutput(reward=reward, is_success=is_success, metrics=metrics)


def _as_rewards(rewards: Mapping[Any, Any]) -> dict[str, float]:
    if not rewards:
        raise Misbehaved("returned an empty mapping of rewards; it must name every agent or role that trains")
    for name, reward in rewards.items():
        if not isinstance(name, str) or not _is_reward(reward):
            raise Misbehaved(
                f"returned the reward {name!r}: {reward!r}; it must be an agent's name and a finite number"
            )
    return {name: float(reward) for name, reward in rewards.items()}


def _is_reward(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and _is_finite(value)


def _as_metrics(metrics: Any) -> dict[str, float]:
    """The metrics as floats: they are averaged over a step, where one that is no number would spoil all."""
    if not isinstance(metrics, Mapping):
        raise Misbehaved(f"returned the metrics {metrics!r}; they must be a mapping of names to finite numbers")
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise Misbehaved(f"returned a metric called {name!r}; its name must be a string")
        if not isinstance(value, numbers.Real) or not _is_finite(value):
            raise Misbehaved(f"returned the metric {name} = {value!r}; it must be a finite number, or be left out")
    return {name: float(value) for name, value in metrics.items()}


def _is_finite(number: Any) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # an integer beyond every float
        return False
