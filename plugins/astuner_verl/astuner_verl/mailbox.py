"""What verl's workers tell the run beside verl: log-probabilities from before an update (`before_update` of the core).

verl has no way for tensors out of an update, of which it keeps metrics only.  So workers put them into a mailbox, an
actor between them and the run, which takes them out when the step is over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ray

if TYPE_CHECKING:
    from astuner_ray.training.before_update import Found


class _Mailbox:
    """The actor."""

    def __init__(self) -> None:
        self._found: dict[int, Found] = {}

    def put(self, step: int, found: Found) -> None:
        self._found.setdefault(step, {}).update(found)

    def take(self, step: int) -> Found:
        return self._found.pop(step, {})


class Mailbox:
    """A handle of it, which can be sent to workers; it closes with the connection to Ray."""

    def __init__(self) -> None:
        self._actor: Any = ray.remote(_Mailbox).options(num_cpus=0).remote()

    def send(self, step: int, found: Found) -> None:
        """Put it in; called in a worker."""
        ray.get(self._actor.put.remote(step, found))

    def take(self, step: int) -> Found:
        """What workers have found in ``step``: row -> log-probabilities."""
        found: Found = ray.get(self._actor.take.remote(step))
        return found
