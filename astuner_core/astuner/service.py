"""A server that an experiment needs beside it, started by ``astuner run --with NAME`` and stopped at its end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class Service(ABC):
    """Starts a server, knows when it answers, and stops it again."""

    def __init__(self, config: Any = None) -> None:
        self.config = config

    @abstractmethod
    def start(self) -> None:
        """Start it and return at once; raise when that is impossible."""

    @abstractmethod
    def is_ready(self) -> bool:
        """Whether it really answers (a request, not a line in a log)."""

    @abstractmethod
    def stop(self) -> None:
        """Stop what `start` started, and only that; also called after a failed start and on Ctrl-C."""

    def address(self) -> str:
        """Where it listens, for the plan and the log."""
        return ""
