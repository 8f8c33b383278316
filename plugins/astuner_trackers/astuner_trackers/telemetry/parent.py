"""An episode's root span as the parent of spans that the agent's own framework starts meanwhile.

A person who has AgentScope's tracing on, say, finds its spans in the trace of their episode.  The root span itself is
made when the episode is over; until then only its ids exist.  This works where episodes run in the process of the run.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from astuner.contracts.parts import EpisodeContextPart
from astuner_trackers.telemetry.episode_spans import root_of
from astuner_trackers.telemetry.run_ids import RunIds, is_sampled

_lock = threading.Lock()
_traced: list[tuple[RunIds, float]] = []
"""The runs of this process whose episodes are sent out, and which share of them."""


def begin(ids: RunIds, share: float) -> None:
    """The root spans of this run's episodes will be sent."""
    with _lock:
        _traced.append((ids, share))


def end(ids: RunIds) -> None:
    """They will not any more."""
    with _lock:
        _traced[:] = [one for one in _traced if one[0] != ids]


class EpisodeSpans(EpisodeContextPart):
    """The part ``episode_context``."""

    def around(self, episode_id: str) -> AbstractContextManager[None]:
        return parent_of_spans(episode_id)


@contextmanager
def parent_of_spans(episode_id: str) -> Iterator[None]:
    """Within it, OpenTelemetry's current span is the episode's root, if that will be sent."""
    with _lock:
        runs = list(_traced)
    if len(runs) != 1 or "opentelemetry.trace" not in sys.modules:  # none, or nobody could say which
        yield
        return
    ((ids, share),) = runs
    trace_id, span_id = root_of(episode_id, ids)
    if not is_sampled(trace_id, share):
        yield
        return
    from opentelemetry import context, trace

    flags = trace.TraceFlags(trace.TraceFlags.SAMPLED)
    root = trace.NonRecordingSpan(trace.SpanContext(trace_id, span_id, is_remote=True, trace_flags=flags))
    token = context.attach(trace.set_span_in_context(root))
    try:
        yield
    finally:
        context.detach(token)
