"""Interface of log sinks: subscribers that export metrics and episodes, with one method per kind of event.

Each sink runs in its own thread and receives events in order. If a sink raises or takes longer than two minutes for a
call, the error is reported once and the sink is disabled; the run continues.
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
    """Receiver of a run's metrics and episodes."""

    def __init__(self, config: Any = None) -> None:
        self.config = config

    def open(self, run_dir: Path, run_name: str, settings: Mapping[str, Any]) -> None:
        """Open the sink; called once before the first step.

        :param settings: The resolved config without secrets.
        """
        return None

    @abstractmethod
    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a training step or validation; ``docs/metrics.md`` lists the names."""

    def episode(self, step: int, episode: Episode) -> None:
        """Log a finished episode, scored or not."""
        return None

    def progress(self, progress: Progressed) -> None:
        """Show the progress of the current phase."""
        return None

    def note(self, text: str) -> None:
        """Log a text for the user: a plan, a warning, a summary."""
        return None

    def close(self) -> None:
        """Close the sink; called once, also after a failure."""
        return None

    def wants(self, event: Event) -> bool:
        """Return whether the sink implements the method for this event."""
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
            self.progress(event)
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
"""Class of an event -> name of the method that handles it."""
