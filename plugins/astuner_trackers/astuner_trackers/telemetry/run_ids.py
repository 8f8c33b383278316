"""Names of what one run sends out, equal in everything that it sends and different in any other run.

Episode ids repeat from run to run, since they count draws and attempts, and tracing systems keep many runs.  Trace and
span ids are derived rather than drawn, so that a span can be named as a parent before it is made (`parent`).
"""

from __future__ import annotations

import hashlib
import threading
import uuid
from dataclasses import dataclass
from pathlib import Path

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


def begin(run_dir: Path) -> RunIds:
    """The ids of the run in this folder, for each sink that asks until `end`."""
    with _lock:
        return _runs.setdefault(run_dir, RunIds(uuid.uuid4().hex[:16]))


def end(run_dir: Path) -> None:
    """The run is over; one that begins later in the same folder is another."""
    with _lock:
        _runs.pop(run_dir, None)
