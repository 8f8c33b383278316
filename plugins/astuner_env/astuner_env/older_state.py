"""What an environment of the older kind says, in a class or over the wire: plain data in, our dataclasses out.

Strict where a number decides something (a reward, a score, whether it is over), lenient where only a spelling differs:
a state is a text, a message, or a list of messages, a score a number or a report.  Standard library only, as
`astuner_env.older_environment`, which uses it.

Invariant: what is missing or no number raises `NotUnderstood`; nothing is filled in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from astuner.contracts.environment import Evaluation, StepResult

_SHOWN = 200
_TEXT_PARTS = ("text", "input_text", "output_text")


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


def shown_text(text: Any) -> str:
    """What the service says about itself, not endlessly."""
    return "" if text is None else str(text)[:2000]


def number(what: str, value: Any) -> float:
    """``value`` as a finite float."""
    try:
        if isinstance(value, Real) and math.isfinite(value):  # NumPy's numbers are such as well
            return float(value)
    except OverflowError:  # a whole number beyond every float
        pass
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
    """The text of a message's content, which is a text or a list of text parts."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        raise NotUnderstood(f"a message's content is {shown(content)}; it must be text or a list of text parts")
    return "\n".join(_text_of_part(part) for part in content)


def _text_of_part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type", "text") in _TEXT_PARTS:
        text = part.get("text")
        if text is None or isinstance(text, str):
            return text or ""
    raise NotUnderstood(f"a message holds {shown(part)}; agents read text only, so send parts of type 'text'")
