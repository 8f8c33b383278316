"""Where a run's numbers and episodes go besides the run folder: a subscriber with a method for each thing it hears.

A sink is called in a thread of its own, in order.  One that raises, or takes longer than two minutes for a call, is
reported once and left out of the rest of the run; it never stops it, nor holds it up.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from astuner.contracts.building import Built
from astuner.contracts.events import EpisodeEnded, Event, Measured, Note, Progressed, RunClosed, RunStarted, Subscriber
from astuner.contracts.types import Episode


class LogSink(Built, Subscriber, ABC):
    """Receives what a run measures."""

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

    def wants(self, event: Event) -> bool:
        """Only what one of its methods is about."""
        method = _METHODS.get(type(event))
        return method is not None and getattr(type(self), method) is not getattr(LogSink, method)

    def handle(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self.open(event.run_dir, event.name, event.settings)
        elif isinstance(event, Measured):
            self.step(event.step, event.metrics)
        elif isinstance(event, EpisodeEnded):
            self.episode(event.step, event.episode)
        elif isinstance(event, Progressed):
            self.progress(event.step, event.total_steps, event.done, event.total, event.what)
        elif isinstance(event, Note):
            self.note(event.text)
        elif isinstance(event, RunClosed):
            self.close()


_METHODS = {
    RunStarted: "open",
    EpisodeEnded: "episode",
    Progressed: "progress",
    Note: "note",
    RunClosed: "close",
    **dict.fromkeys(Measured.__subclasses__(), "step"),
}
"""Kind of event -> the method that is told of it."""
