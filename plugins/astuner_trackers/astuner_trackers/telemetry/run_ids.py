"""Derive trace and span IDs of a run, and make an episode's root span the parent of its agent framework's spans.

IDs are equal in everything that one run sends and differ between runs. Episode IDs count tasks and attempts and repeat
from run to run, while tracing systems store many runs. IDs are derived instead of random, so that a span can be
referenced as a parent before it is created: the root span is created at the end of the episode. If an agent framework
such as AgentScope creates its own spans, they appear in the episode's trace, provided that episodes run in the process
of the run.
"""

from __future__ import annotations

import hashlib
import sys
import threading
import uuid
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from astuner.contracts.parts import EpisodeContextPart

_TRACE_BITS = 64
"""Bits that decide whether a trace is sampled, the last ones as in OpenTelemetry's `TraceIdRatioBased`."""


@dataclass(frozen=True)
class RunIds:
    """IDs of one run, from start or resumption to end."""

    run: str
    """16 random hexadecimal digits."""

    def conversation(self, episode_id: str) -> str:
        """Return the ID of an episode in `gen_ai.conversation.id` and AgentScope Studio."""
        return f"{self.run}-{episode_id}"

    def root(self, episode_id: str) -> tuple[int, int]:
        """Return (trace ID, span ID) of an episode's root span, also before the span exists."""
        return self.trace(episode_id), self.span(episode_id)

    def trace(self, name: str) -> int:
        """Return a trace ID of 128 bits."""
        return self._derived(f"trace {name}", 16)

    def span(self, *name: object) -> int:
        """Return a span ID of 64 bits."""
        return self._derived(f"span {name}", 8)

    def _derived(self, name: str, size: int) -> int:
        digest = hashlib.blake2b(f"{self.run} {name}".encode("utf-8", "backslashreplace"), digest_size=size).digest()
        return int.from_bytes(digest, "big") or 1  # 0 is not a valid ID


def is_sampled(trace_id: int, share: float) -> bool:
    """Return whether a trace is in the sampled ``share``."""
    return trace_id % (1 << _TRACE_BITS) < share * (1 << _TRACE_BITS)


_lock = threading.Lock()
_runs: dict[Path, RunIds] = {}
_traced: dict[Path, float] = {}
"""Active runs that send root spans -> share of their episodes that is sent."""


def begin(run_dir: Path, *, traced: float | None = None) -> RunIds:
    """Return the IDs of the run in this folder, shared by all sinks until `end`.

    :param traced: Share of the episodes whose root spans are sent, if any.
    """
    with _lock:
        if traced is not None:
            _traced[run_dir] = traced
        return _runs.setdefault(run_dir, RunIds(uuid.uuid4().hex[:16]))


def end(run_dir: Path) -> None:
    """Mark the run as finished. A later run in the same folder gets new IDs."""
    with _lock:
        _runs.pop(run_dir, None)
        _traced.pop(run_dir, None)


class EpisodeSpans(EpisodeContextPart):
    """Part ``episode_context``: within it, OpenTelemetry's current span is the episode's root span, if it is sent."""

    def around(self, episode_id: str) -> AbstractContextManager[Any]:
        with _lock:
            traced = [(_runs[run_dir], share) for run_dir, share in _traced.items() if run_dir in _runs]
        if len(traced) != 1 or "opentelemetry.trace" not in sys.modules:  # no run, or several, or tracing is unused
            return nullcontext()
        ((ids, share),) = traced
        trace_id, span_id = ids.root(episode_id)
        if not is_sampled(trace_id, share):
            return nullcontext()
        from opentelemetry import trace

        flags = trace.TraceFlags(trace.TraceFlags.SAMPLED)
        root = trace.NonRecordingSpan(trace.SpanContext(trace_id, span_id, is_remote=True, trace_flags=flags))
        return trace.use_span(root, record_exception=False, set_status_on_exception=False)
