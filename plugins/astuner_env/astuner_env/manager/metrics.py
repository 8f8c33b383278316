"""What the service counts and measures, for Prometheus.

Invariant: every label's values come from a fixed set (environments, operations, reasons), never from a request.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

OPERATIONS = ("reset", "step", "evaluate", "describe", "tasks")
LOSSES = ("crashed", "timeout", "expired", "stopped")
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class Metrics:
    """The instruments of one service, in a registry of their own.

    :param environments: their names.
    """

    def __init__(self, environments: Iterable[str]) -> None:
        self.registry = CollectorRegistry()
        each: list[str] = ["environment"]
        own: Any = {"registry": self.registry, "namespace": "astuner_env"}
        self.created = Counter("created", "Instances created.", each, **own)
        self.lost = Counter("lost", "Instances that ended without anybody wanting it.", [*each, "reason"], **own)
        self.replayed = Counter("replayed", "Steps answered from memory.", each, **own)
        self.zygote_restarts = Counter("zygote_restarts", "Zygotes started anew.", each, **own)
        self.refused = Counter("refused", "Requests refused, by code.", ["code"], **own)
        told = "Time in an environment; reset includes no wait for a slot."
        seconds = Histogram("operation_seconds", told, [*each, "operation"], buckets=_SECONDS, **own)
        self.active = Gauge("active", "Instances now.", each, **own)
        self.memory = Gauge("resident_bytes", "Memory of all processes; what they share counts once.", each, **own)
        self.queue = Gauge("queue_depth", "Requests that wait for a slot.", **own)
        self.capacity = Gauge("max_instances", "Instances that may exist at once.", **own)
        self.seconds: dict[tuple[str, str], Histogram] = {}
        """Of each environment and operation."""
        for name in environments:  # from zero on, so that rates exist from the first one
            for counter in (self.created, self.replayed, self.zygote_restarts):
                counter.labels(name)
            for reason in LOSSES:
                self.lost.labels(name, reason)
            for operation in OPERATIONS:
                self.seconds[name, operation] = seconds.labels(name, operation)

    def render(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self.registry)
