"""What the service counts and measures, for Prometheus.

Invariant: every label's values come from a fixed set (environments, operations, reasons), never from a request.
"""

from __future__ import annotations

from collections.abc import Iterable

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
        each, own = ["environment"], self.registry
        self.created = Counter("astuner_env_created", "Instances created.", each, registry=own)
        self.lost = Counter(
            "astuner_env_lost", "Instances that ended without anybody wanting it.", [*each, "reason"], registry=own
        )
        self.replayed = Counter("astuner_env_replayed", "Steps answered from memory.", each, registry=own)
        self.zygote_restarts = Counter("astuner_env_zygote_restarts", "Zygotes started anew.", each, registry=own)
        self.refused = Counter("astuner_env_refused", "Requests refused, by code.", ["code"], registry=own)
        seconds = Histogram(
            "astuner_env_operation_seconds",
            "Time in an environment; reset includes no wait for a slot.",
            [*each, "operation"],
            buckets=_SECONDS,
            registry=own,
        )
        self.active = Gauge("astuner_env_active", "Instances now.", each, registry=own)
        self.memory = Gauge(
            "astuner_env_resident_bytes", "Memory of all processes; what they share counts once.", each, registry=own
        )
        self.queue = Gauge("astuner_env_queue_depth", "Requests that wait for a slot.", registry=own)
        self.capacity = Gauge("astuner_env_max_instances", "Instances that may exist at once.", registry=own)
        self._seconds = {}
        for name in environments:  # from zero on, so that rates exist from the first one
            for counter in (self.created, self.replayed, self.zygote_restarts):
                counter.labels(name)
            for reason in LOSSES:
                self.lost.labels(name, reason)
            for operation in OPERATIONS:
                self._seconds[name, operation] = seconds.labels(name, operation)

    def took(self, environment: str, operation: str, seconds: float) -> None:
        """Note how long an operation took."""
        self._seconds[environment, operation].observe(seconds)

    def render(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self.registry)
