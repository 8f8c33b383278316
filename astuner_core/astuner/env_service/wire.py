"""What the service's answers mean: plain data in, our dataclasses out.

Strict where a number decides something (a reward, a score, whether it is over), lenient where only a spelling differs:
the reference service says a state as a list of messages or as one, and a score as a number or as a report.

Invariant: what is missing or no number raises `NotUnderstood`; nothing is filled in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from astuner.chat.errors import UnsupportedRequest
from astuner.chat.messages import text_of
from astuner.environment import Evaluation, StepResult

_SHOWN = 200


class NotUnderstood(ValueError):
    """An answer that is not what the route answers; says what is wrong with it."""


def data_of(answer: Any) -> Any:
    """The ``data`` of a successful answer."""
    if not isinstance(answer, Mapping) or "success" not in answer:
        raise NotUnderstood(f"the answer has no field success: {shown(answer)}")
    if answer["success"] is not True:
        raise NotUnderstood(f"the service says that it failed, and not why: {shown(answer)}")
    return answer.get("data")


def started(data: Any) -> StepResult:
    """What ``/create`` answers; it is over before the first step only where the service says so."""
    fields = _fields(data)
    return _result(fields, reward=fields.get("reward", 0.0), is_over=fields.get("is_terminated", False))


def stepped(data: Any) -> StepResult:
    """What ``/step`` answers."""
    fields = _fields(data)
    for name in ("reward", "is_terminated"):
        if name not in fields:
            raise NotUnderstood(f"a step's answer has no {name}: {shown(data)}")
    return _result(fields, reward=fields["reward"], is_over=fields["is_terminated"])


def evaluated(data: Any) -> Evaluation | None:
    """What ``/evaluate`` answers: a number, or a report with a ``score``; None for a report without one."""
    if not isinstance(data, Mapping):
        return Evaluation(score=number("the score", data))
    if "score" not in data:
        return None
    success, details = data.get("success"), data.get("details")
    if success is not None and not isinstance(success, bool):
        raise NotUnderstood(f"success is {shown(success)}; it must be true, false or null")
    if details is not None and not isinstance(details, Mapping):
        raise NotUnderstood(f"the details are {shown(details)}; they must be an object")
    return Evaluation(score=number("the score", data["score"]), success=success, details=dict(details or {}))


def task_ids(data: Any) -> list[str]:
    """What ``/get_env_profile`` answers; some services have numbers for ids."""
    if not isinstance(data, list) or not all(isinstance(i, (str, int)) and not isinstance(i, bool) for i in data):
        raise NotUnderstood(f"the tasks are {shown(data)}; they must be a list of ids")
    return [str(i) for i in data]


def number(what: str, value: Any) -> float:
    """``value`` as a finite float."""
    try:
        if isinstance(value, (int, float)) and math.isfinite(value):
            return float(value)
    except OverflowError:  # a whole number beyond every float
        pass
    raise NotUnderstood(f"{what} is {shown(value)}; it must be a finite number")


def shown(value: Any) -> str:
    """The beginning of a value, for a message."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def shown_text(text: Any) -> str:
    """What the service says about itself, not endlessly."""
    return "" if text is None else str(text)[:2000]


def _fields(data: Any) -> Mapping[str, Any]:
    if not isinstance(data, Mapping) or "state" not in data:
        raise NotUnderstood(f"the answer has no state: {shown(data)}")
    return data


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
    try:
        text_of(message["content"])
    except UnsupportedRequest as e:
        raise NotUnderstood(str(e)) from e
    # Every message of the reference has the key; an empty list would change how a chat template shows it.
    return {name: value for name, value in message.items() if name != "tool_calls" or value}


def _observation(messages: Sequence[Mapping[str, Any]]) -> str:
    """What is new to the agent: everything but a system prompt."""
    said = [m for m in messages if m["role"] != "system"] or messages
    return "\n".join(text_of(m["content"]) for m in said)
