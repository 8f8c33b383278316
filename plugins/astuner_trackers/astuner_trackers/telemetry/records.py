"""Spans as plain data, and the span of a step. Nothing here needs OpenTelemetry."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from astuner_trackers.telemetry.run_ids import RunIds

Attribute = str | bool | int | float | Sequence[str]
CLIENT, SERVER, INTERNAL = "client", "server", "internal"
"""Kinds of spans: a call that goes to a server, its other side, and anything else."""
VALIDATION_TIME = "time/validation"
"""Only the numbers of a validation have this one."""


@dataclass(frozen=True)
class Event:
    """Something that happened at a moment of a span."""

    name: str
    time: float
    attributes: Mapping[str, Attribute]


@dataclass(frozen=True, kw_only=True)
class Span:
    """Times are seconds since 1970."""

    name: str
    trace_id: int
    span_id: int
    parent_id: int | None = None
    start: float
    end: float
    attributes: Mapping[str, Attribute]
    kind: str = INTERNAL
    error: str = ""
    """Why it failed; empty where it did not."""
    events: Sequence[Event] = ()
    links: Sequence[tuple[int, int]] = ()
    """(trace id, span id) of others."""


def step_span(
    step: int, metrics: Mapping[str, float], ids: RunIds, links: Sequence[tuple[int, int]], *, now: float | None = None
) -> Span:
    """A trace of its own for the numbers of a step, linked to the traces of its episodes; also for a validation."""
    now = time.time() if now is None else now
    name = "validation" if VALIDATION_TIME in metrics else "train_step"
    seconds = metrics.get(VALIDATION_TIME, metrics.get("time/step", 0.0))
    attributes = {f"astuner.metrics.{dotted(key)}": value for key, value in metrics.items()}
    return Span(
        name=name,
        trace_id=ids.trace(f"{name} {step}"),
        span_id=ids.span(name, step),
        start=now - max(seconds, 0.0),
        end=now,
        attributes={"astuner.step": step, **attributes},
        links=tuple(links),
    )


def dotted(metric: str) -> str:
    """A metric's name with OpenTelemetry's separator."""
    return metric.replace("/", ".")
