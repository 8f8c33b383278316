"""What the service's answers mean: plain data in, our dataclasses out.

Strict where a number decides something, lenient where only a spelling differs: the reference service says a score as a
number or as a report.  States are read by `astuner_env.older_state`.

Invariant: what is missing or no number raises `NotUnderstood`; nothing is filled in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from astuner.contracts.environment import Evaluation
from astuner_env.older_state import NotUnderstood, number, shown, started, stepped

__all__ = ["NotUnderstood", "data_of", "evaluated", "number", "shown_text", "started", "stepped", "task_ids"]


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
