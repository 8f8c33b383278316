"""How the instances that are gone came to their end, for who still asks after them; the last few thousand."""

from __future__ import annotations

from collections import OrderedDict

from astuner_env.manager.refusal import Loss, Refusal

_REMEMBERED = 10_000


class Ends:
    """Instance id -> its end."""

    def __init__(self, size: int = _REMEMBERED) -> None:
        self._size = size
        self._ends: OrderedDict[str, Loss] = OrderedDict()

    def add(self, instance_id: str, loss: Loss) -> None:
        self._ends.pop(instance_id, None)
        self._ends[instance_id] = loss
        while len(self._ends) > self._size:
            self._ends.popitem(last=False)

    def remove(self, instance_id: str) -> None:
        self._ends.pop(instance_id, None)

    def refusal(self, instance_id: str) -> Refusal:
        """What to answer to a request for an instance that is not there."""
        return absence(instance_id, self._ends.get(instance_id))

    def __len__(self) -> int:
        return len(self._ends)


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
