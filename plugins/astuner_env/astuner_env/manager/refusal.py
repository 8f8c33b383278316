"""Why the service does not do what it was asked, in words for programs and for people.

Invariant: a refusal never stands for something that happened in a world: no observation and no reward comes with it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, TypeVar

STATUS = {
    "bad_request": 400,
    "bad_params": 400,
    "unknown_env": 400,
    "unknown_task": 400,
    "unknown_split": 400,
    "unauthorized": 401,
    "forbidden": 403,
    "not_found": 404,
    "unknown_instance": 404,
    "method_not_allowed": 405,
    "over": 409,
    "instance_lost": 410,
    "too_large": 413,
    "unsupported_encoding": 415,
    "unexpected": 417,
    "not_json": 422,
    "env_error": 500,
    "internal": 500,
    "busy": 503,
    "timeout": 504,
}
"""Each code and its HTTP status."""
T = TypeVar("T")


@dataclass(eq=False)
class Refusal(Exception):
    """An answer that is not what was asked for."""

    code: str
    """One of `STATUS`."""
    message: str
    """What is wrong and what to do, for people."""
    reason: str = ""
    """How an instance was lost, as a word for programs."""
    retry_after: int | None = None
    """Seconds after which asking again may help."""
    place: str = ""
    """Where in its code the environment failed, as the end of the message; for clients of this machine."""
    traceback: str = ""
    """The environment's; it goes to the log, and to the client with ``--debug`` only."""

    def __post_init__(self) -> None:
        super().__init__(self.message)
        self.status = STATUS[self.code]

    def detail(self, *, is_local: bool = False, debug: bool = False) -> dict[str, Any]:
        """What a client sees under ``detail``.

        :param is_local: it is of this machine, and may know where its code lies.
        """
        shown: dict[str, Any] = {"code": self.code, "message": self.message}
        if is_local or debug:
            shown["message"] += self.place
        if self.reason:
            shown["reason"] = self.reason
        if debug and self.traceback:
            shown["traceback"] = self.traceback
        return shown


@dataclass(frozen=True)
class Loss:
    """How an instance ended."""

    kind: str
    """A word: released, replaced, failed, abandoned, crashed, timeout, expired, stopped,
    memory, processes."""
    message: str
    """For people: what happened, as the end of the sentence "Instance X …"."""

    @property
    def was_asked_for(self) -> bool:
        """Whether a client wanted it gone; otherwise an episode was lost."""
        return self.kind in ("released", "replaced", "abandoned", "failed")


class Latest(OrderedDict[str, T]):
    """What was put in last, ``size`` entries at most."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size

    def __setitem__(self, key: str, value: T) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._size:
            self.popitem(last=False)


def absence(instance_id: str, loss: Loss | None) -> Refusal:
    """The refusal that tells how an instance ended; None: nobody here ever knew it."""
    if loss is None:
        return Refusal("unknown_instance", f"Instance {instance_id} not found! Create it first.")
    if loss.was_asked_for:
        return Refusal("unknown_instance", f"Instance {instance_id} not found! It {loss.message}.", reason=loss.kind)
    return Refusal(
        "instance_lost",
        f"Instance {instance_id} {loss.message}; its state is lost: begin the episode again",
        reason=loss.kind,
    )
