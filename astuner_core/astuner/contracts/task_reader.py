"""Where tasks come from.

A task reader is built once per run with its own validated section (``astuner.task_reader.<name>``) and yields
tasks, lazily and in a stable order; shuffling and repeating is the core's business, so that a run can resume.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from astuner.contracts.building import Built
from astuner.contracts.types import Split, Task


class TaskReader(Built, ABC):
    """Yields the tasks of a split."""

    of_environments: ClassVar[bool] = False
    """Whether its tasks are those of environments (`Task.env_type`), in which a workflow acts."""

    def __init__(self, config: Any = None) -> None:
        """Keep the section; open nothing yet.

        :param config: an instance of the provider's ``config`` model, or None when it declares none.
        """
        self.config = config

    @classmethod
    def missing(cls, section: Any, base_dir: Path) -> tuple[str, str]:
        """What is to be fetched and cannot be had: the key of the section that names it, and why; empty if nothing.

        It is asked before anything heavy is imported, and takes seconds at most.

        :param section: as for the constructor.
        :param base_dir: the experiment file's folder.
        """
        return "", ""

    @property
    def elsewhere(self) -> str:
        """Where the tasks would have to be fetched from, which `astuner config check` does not do; empty: from here."""
        return ""

    @abstractmethod
    def read(self, split: Split) -> Iterator[Task]:
        """Yield the tasks of ``split``; the same ones in the same order every time.

        :raises astuner.contracts.errors.DataError: a task cannot be read; names file and line.
        """
