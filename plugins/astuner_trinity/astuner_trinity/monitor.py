"""Trinity's trackers: none, for the log sinks are the run's.

What the trainer measures comes to the run with each step (`astuner_trinity.stages`); what the explorer measures the run
measures itself, over episodes.
"""

from __future__ import annotations

from typing import Any

from trinity.utils.monitor import Monitor


class NoMonitor(Monitor):
    """Set as ``monitor.monitor_type``."""

    def __init__(self, project: str, group: str, name: str, role: str, config: Any = None) -> None:
        super().__init__(project=project, name=name, role=role, config=config)

    def log(self, data: dict[str, Any], step: int, commit: bool = False) -> None:
        """Nothing: see above."""

    def close(self) -> None:
        """Nothing is open."""
