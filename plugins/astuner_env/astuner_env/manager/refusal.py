"""Define the error responses of the service, for programs and for people.

Invariant: a refusal contains neither an observation nor a reward; it never represents an event in an environment.
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
"""HTTP status of each error code."""
T = TypeVar("T")


@dataclass(eq=False)
class Refusal(Exception):
    """Error response to a request."""

    code: str
    """One of `STATUS`."""
    message: str
    """What is wrong and what to do."""
    reason: str = ""
    """Reason for the loss of an instance, for programs."""
    retry_after: int | None = None
    """Seconds after which a retry may succeed."""
    place: str = ""
    """Source location of the environment's error, appended to the message for clients on this machine."""
    traceback: str = ""
    """Traceback of the environment; written to the log, and sent to clients only with ``--debug``."""

    def __post_init__(self) -> None:
        super().__init__(self.message)
        self.status = STATUS[self.code]

    def detail(self, *, is_local: bool = False, debug: bool = False) -> dict[str, Any]:
        """Return the ``detail`` object for a client.

        :param is_local: Whether the client is on this machine and may see source locations.
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
    """Reason why an instance ended."""

    kind: str
    """One of: released, replaced, failed, abandoned, crashed, timeout, expired, stopped, memory, processes."""
    message: str
    """Message that completes the sentence "Instance X …"."""

    @property
    def was_asked_for(self) -> bool:
        """Whether a client caused the end; otherwise an episode was lost."""
        return self.kind in ("released", "replaced", "abandoned", "failed")


class Latest(OrderedDict[str, T]):
    """Mapping that keeps the latest ``size`` entries."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size

    def __setitem__(self, key: str, value: T) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._size:
            self.popitem(last=False)


def absence(instance_id: str, loss: Loss | None) -> Refusal:
    """Return the refusal for a missing instance; ``None`` as loss means that the ID is unknown."""
    if loss is None:
        return Refusal("unknown_instance", f"Instance {instance_id} not found! Create it first.")
    if loss.was_asked_for:
        return Refusal("unknown_instance", f"Instance {instance_id} not found! It {loss.message}.", reason=loss.kind)
    return Refusal(
        "instance_lost",
        f"Instance {instance_id} {loss.message}; its state is lost. Start the episode again.",
        reason=loss.kind,
    )
