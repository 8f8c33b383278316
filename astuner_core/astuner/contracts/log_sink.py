"""Where a run's numbers and episodes go besides the run folder.

A sink is called in a thread of its own, in order.  One that raises, or takes longer than two minutes for a call, is
reported once and left out of the rest of the run; it never stops it, nor holds it up.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from astuner.contracts.types import Episode


def _to_terminal(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class LogSink(ABC):
    """Receives what a run measures."""

    remark: Callable[[str], None] = staticmethod(_to_terminal)
    """For a sink to call, from any thread: the run tells the person, e.g. that a server is down for the moment."""

    essential: ClassVar[bool] = False
    """True: the run cannot go on without it (the run folder's own books), so what it raises ends the run."""

    direct: ClassVar[bool] = False
    """True: called by the run itself, which waits for it, as for a terminal that a person may pause."""

    def __init__(self, config: Any = None) -> None:
        self.config = config

    def open(self, run_dir: Path, run_name: str, settings: Mapping[str, Any]) -> None:
        """Called once before the first step. ``settings`` is the resolved config with secrets removed."""
        return None

    @abstractmethod
    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of one training step or evaluation; names as in ``docs/metrics.md``."""

    def episode(self, step: int, episode: Episode) -> None:
        """One finished episode, scored or not."""
        return None

    def progress(self, step: int, total_steps: int, done: int, total: int, what: str) -> None:
        """``done`` of ``total`` episodes of a step have ended; ``what`` is ``rollout`` or ``validation``."""
        return None

    def note(self, text: str) -> None:
        """Something a person should read: a plan, a warning, a summary."""
        return None

    def close(self) -> None:
        """Called once, also after a failure."""
        return None
