"""Define the Prometheus metrics of the service.

Invariant: label values come from a fixed set (environments, operations, reasons), never from a request.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

OPERATIONS = ("reset", "step", "evaluate", "describe", "tasks")
LOSSES = ("crashed", "timeout", "expired", "stopped")
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class Metrics:
    """Metrics of one service, in a separate registry.

    :param environments: Names of the environments.
    """

    def __init__(self, environments: Iterable[str]) -> None:
        self.registry = CollectorRegistry()
        each: list[str] = ["environment"]
        own: Any = {"registry": self.registry, "namespace": "astuner_env"}
        self.created = Counter("created", "Instances created.", each, **own)
        self.lost = Counter("lost", "Instances that ended unexpectedly.", [*each, "reason"], **own)
        self.replayed = Counter("replayed", "Steps answered from memory.", each, **own)
        self.zygote_restarts = Counter("zygote_restarts", "Zygotes restarted.", each, **own)
        self.refused = Counter("refused", "Requests refused, by error code.", ["code"], **own)
        told = "Time spent in an environment, without the wait for a slot."
        seconds = Histogram("operation_seconds", told, [*each, "operation"], buckets=_SECONDS, **own)
        self.active = Gauge("active", "Current instances.", each, **own)
        self.memory = Gauge("resident_bytes", "Memory of all processes; shared pages count once.", each, **own)
        self.queue = Gauge("queue_depth", "Requests waiting for a slot.", **own)
        self.capacity = Gauge("max_instances", "Maximum number of instances.", **own)
        self.seconds: dict[tuple[str, str], Histogram] = {}
        """Histogram of each environment and operation."""
        for name in environments:  # start at zero, so that rates include the first event
            for counter in (self.created, self.replayed, self.zygote_restarts):
                counter.labels(name)
            for reason in LOSSES:
                self.lost.labels(name, reason)
            for operation in OPERATIONS:
                self.seconds[name, operation] = seconds.labels(name, operation)

    def render(self) -> bytes:
        """Return the metrics in the Prometheus text format."""
        return generate_latest(self.registry)
