"""Task readers for what an environment says its tasks are.

A task of the service is its id; everything else comes when the environment is opened.  A plugin whose environment has
a reader of its own inherits from `ServiceTasks`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from pydantic import Field

from astuner.config.schema import Section
from astuner.env_service.found import find_client
from astuner.errors import DataError, EnvironmentFailed
from astuner.task_reader import TaskReader
from astuner.types import Split, Task

if TYPE_CHECKING:
    from astuner.config import Config


class SplitsConfig(Section):
    training_split: str = Field("train", min_length=1)
    """The environment's split to train on."""
    validation_split: str | None = "dev"
    """The environment's split to validate on; null for an experiment that does not validate."""


class EnvironmentTasks(TaskReader):
    """The tasks of one environment."""

    config: SplitsConfig

    def __init__(self, config: SplitsConfig, experiment: Config, env_type: str) -> None:
        """
        :param experiment: the whole config, for ``astuner.env_service``.
        :param env_type: the environment.
        """
        super().__init__(config)
        self.experiment = experiment
        self.env_type = env_type

    def read(self, split: Split) -> Iterator[Task]:
        """Yield the tasks of ``split`` in the environment's order.

        :raises DataError: the environment has no such split, or none of its tasks; or it cannot be asked.
        """
        name = self.config.training_split if split is Split.TRAIN else self.config.validation_split
        if name is None:
            return
        tasks = 0
        for task in self.tasks(name):
            tasks += 1
            yield task
        if not tasks:
            key = "training_split" if split is Split.TRAIN else "validation_split"
            raise DataError(
                f"the environment {self.env_type!r} has no tasks in the split {name!r} "
                f"(astuner.task_reader.{self.experiment.astuner.task_reader.type}.{key})"
            )

    @abstractmethod
    def tasks(self, split: str) -> Iterable[Task]:
        """The tasks of the environment's split of this name."""


class ServiceTasks(EnvironmentTasks):
    """Asks the environment service for the ids of a split's tasks, once per split."""

    def __init__(self, config: SplitsConfig, experiment: Config, env_type: str) -> None:
        """:raises ConfigError: it is not known where the service is."""
        super().__init__(config, experiment, env_type)
        self._client = find_client(experiment)

    def tasks(self, split: str) -> Iterator[Task]:
        try:
            ids = self._client.task_ids(self.env_type, split, self.experiment.astuner.env_service.params)
        except EnvironmentFailed as e:
            raise DataError(f"the tasks of {self.env_type!r}, split {split!r}: {e}") from e
        for task_id in ids:
            yield Task(task_id=task_id, env_type=self.env_type)
