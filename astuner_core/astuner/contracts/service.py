"""Interface of services: servers that ``astuner run --with NAME`` starts and stops together with a run."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from astuner.contracts.building import Built


class Service(Built, ABC):
    """A server that runs during an experiment."""

    is_planned_with: bool = True
    """Whether ``--dry-run`` starts it. Set it to False if only training needs the service."""
    run_dir: Path | None = None
    """Folder of the run, which may not exist yet; set before `start`."""

    def __init__(self, config: Any = None) -> None:
        self.config = config

    @abstractmethod
    def start(self, *, url: str = "", log: Path | None = None) -> None:
        """Start the server and return immediately; raise if that fails.

        :param url: Address that the experiment expects; empty: any free port.
        :param log: File for the server's output.
        """

    @abstractmethod
    def is_ready(self) -> bool:
        """Return whether the server answers. Send a request; do not rely on its log.

        :raises astuner.contracts.errors.RunError: The server has ended.
        """

    @abstractmethod
    def stop(self) -> None:
        """Stop the processes that `start` started, and no others. Also called after a failed start and on Ctrl-C."""

    def environ(self) -> Mapping[str, str]:
        """Return environment variables with which the run finds the server; called when it is ready."""
        return {}

    def address(self) -> str:
        """Return the server's address, for the plan and the log."""
        return ""


_set: dict[str, str] = {}


def variable(name: str) -> str:
    """Return an environment variable, or the value set by `variables_set` if code cleared ``os.environ``, or empty."""
    return os.environ.get(name) or _set.get(name, "")


@contextmanager
def variables_set(added: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables in this block, and restore them afterwards."""
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
