"""A server that an experiment needs beside it, started by ``astuner run --with NAME`` and stopped at its end."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from astuner.contracts.building import Built


class Service(Built, ABC):
    """Starts a server, knows when it answers, and stops it again."""

    is_planned_with: bool = True
    """Whether ``--dry-run`` needs it: what only trains is not started for a plan."""
    run_dir: Path | None = None
    """The folder of the run that it stands beside, which may not be there yet; set before `start`."""

    def __init__(self, config: Any = None) -> None:
        self.config = config

    @abstractmethod
    def start(self, *, url: str = "", log: Path | None = None) -> None:
        """Start it and return at once; raise when that is impossible.

        :param url: where the experiment expects it; empty: wherever there is room.
        :param log: the file for what the server prints.
        """

    @abstractmethod
    def is_ready(self) -> bool:
        """Whether it really answers (a request, not a line in a log).

        :raises astuner.contracts.errors.RunError: it never will: it has ended.
        """

    @abstractmethod
    def stop(self) -> None:
        """Stop what `start` started, and only that; also called after a failed start and on Ctrl-C."""

    def environ(self) -> Mapping[str, str]:
        """Variables by which the run finds it, known once it is ready; they hold for as long as it runs."""
        return {}

    def address(self) -> str:
        """Where it listens, for the plan and the log."""
        return ""


_set: dict[str, str] = {}


def variable(name: str) -> str:
    """A variable of this process, else as `variables_set` has it (code may clear ``os.environ``), else empty."""
    return os.environ.get(name) or _set.get(name, "")


@contextmanager
def variables_set(added: Mapping[str, str]) -> Iterator[None]:
    """These variables in this process, and those before afterwards."""
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    _set.update(added)
    try:
        yield
    finally:
        for name, value in before.items():
            _set.pop(name, None)
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
