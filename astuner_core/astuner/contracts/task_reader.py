"""Interface of task readers.

A task reader is created once per run with its section (``astuner.task_reader.<name>``) and yields tasks lazily in a
stable order. The core shuffles and repeats them, so that a run can resume.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from astuner.contracts.building import Built
from astuner.contracts.types import Split, Task


class TaskReader(Built, ABC):
    """A source of tasks."""

    of_environments: ClassVar[bool] = False
    """Whether its tasks have environments (`Task.env_type`)."""

    def __init__(self, config: Any = None) -> None:
        """Store the section. Do not open files yet.

        :param config: Instance of the provider's ``config`` model, or None without a model.
        """
        self.config = config

    @classmethod
    def missing(cls, section: Any, base_dir: Path) -> tuple[str, str]:
        """Return the key of a data set that cannot be downloaded and the reason; both empty if nothing is missing.

        Called before heavy imports; it must take at most a few seconds.

        :param section: As for the constructor.
        :param base_dir: Folder of the experiment file.
        """
        return "", ""

    @property
    def elsewhere(self) -> str:
        """Return the remote source of the tasks, which `astuner config check` does not contact; empty if local."""
        return ""

    @abstractmethod
    def read(self, split: Split) -> Iterator[Task]:
        """Yield the tasks of ``split``, always the same tasks in the same order.

        :raises astuner.contracts.errors.DataError: A task cannot be read. The message contains file and line.
        """
