"""Names of what one run sends out, equal in everything that it sends and different in any other run; and an episode's
root span as the parent of spans that the agent's own framework starts meanwhile.

Episode ids repeat from run to run, since they count draws and attempts, and tracing systems keep many runs.  Trace and
span ids are derived rather than drawn, so that a span can be named as a parent before it is made: the root span is made
when the episode is over.  A person who has AgentScope's tracing on, say, finds its spans in the trace of their episode,
where episodes run in the process of the run.
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
"""What a share of traces is decided by: the last bits, as OpenTelemetry's `TraceIdRatioBased` has it."""


@dataclass(frozen=True)
class RunIds:
    """The ids of one run, from its beginning (or resumption) to its end."""

    run: str
    """16 hexadecimal digits, random."""

    def conversation(self, episode_id: str) -> str:
        """What `gen_ai.conversation.id` and AgentScope Studio call an episode."""
        return f"{self.run}-{episode_id}"

    def root(self, episode_id: str) -> tuple[int, int]:
        """(trace id, span id) of an episode's root span, also before it is over."""
        return self.trace(episode_id), self.span(episode_id)

    def trace(self, name: str) -> int:
        """128 bits."""
        return self._derived(f"trace {name}", 16)

    def span(self, *name: object) -> int:
        """64 bits."""
        return self._derived(f"span {name}", 8)

    def _derived(self, name: str, size: int) -> int:
        digest = hashlib.blake2b(f"{self.run} {name}".encode("utf-8", "backslashreplace"), digest_size=size).digest()
        return int.from_bytes(digest, "big") or 1  # 0 is no id


def is_sampled(trace_id: int, share: float) -> bool:
    """Whether a trace is among the ``share`` that are kept."""
    return trace_id % (1 << _TRACE_BITS) < share * (1 << _TRACE_BITS)


_lock = threading.Lock()
_runs: dict[Path, RunIds] = {}
_traced: dict[Path, float] = {}
"""Those of them whose root spans will be sent, and of which share of their episodes."""


def begin(run_dir: Path, *, traced: float | None = None) -> RunIds:
    """The ids of the run in this folder, for each sink that asks until `end`.

    :param traced: the share of its episodes whose root spans will be sent, if any are.
    """
    with _lock:
        if traced is not None:
            _traced[run_dir] = traced
        return _runs.setdefault(run_dir, RunIds(uuid.uuid4().hex[:16]))


def end(run_dir: Path) -> None:
    """The run is over; one that begins later in the same folder is another."""
    with _lock:
        _runs.pop(run_dir, None)
        _traced.pop(run_dir, None)


class EpisodeSpans(EpisodeContextPart):
    """The part ``episode_context``: within it, OpenTelemetry's current span is the episode's root, if that will be
    sent."""

    def around(self, episode_id: str) -> AbstractContextManager[Any]:
        with _lock:
            traced = [(_runs[run_dir], share) for run_dir, share in _traced.items() if run_dir in _runs]
        if len(traced) != 1 or "opentelemetry.trace" not in sys.modules:  # none, or nobody could say which
            return nullcontext()
        ((ids, share),) = traced
        trace_id, span_id = ids.root(episode_id)
        if not is_sampled(trace_id, share):
            return nullcontext()
        from opentelemetry import trace

        flags = trace.TraceFlags(trace.TraceFlags.SAMPLED)
        root = trace.NonRecordingSpan(trace.SpanContext(trace_id, span_id, is_remote=True, trace_flags=flags))
        return trace.use_span(root, record_exception=False, set_status_on_exception=False)
