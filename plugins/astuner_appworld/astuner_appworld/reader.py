"""The tasks of AppWorld's splits, as the environment service lists them: the ids, and nothing of the tasks' text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import Field

from astuner import Task, TaskReader
from astuner.config.schema import Section
from astuner.env_service import find_client
from astuner.errors import DataError, EnvironmentFailed
from astuner.types import Split

if TYPE_CHECKING:
    from astuner.config import Config

ENVIRONMENT = "appworld"


class AppWorldTasksConfig(Section):
    training_split: str = Field("train", min_length=1)
    """AppWorld's split to train on: train, dev, test_normal or test_challenge."""
    validation_split: str | None = "dev"
    """The split to validate on; null for an experiment that does not validate. Report results on the test splits."""


class AppWorldTaskReader(TaskReader):
    """Asks the service once per split."""

    config: AppWorldTasksConfig

    def __init__(self, config: AppWorldTasksConfig, experiment: Config) -> None:
        """:param experiment: the whole config, for ``astuner.env_service``.

        :raises ConfigError: it is not known where the service is.
        """
        super().__init__(config)
        self._params = experiment.astuner.env_service.params
        self._client = find_client(experiment)

    def read(self, split: Split) -> Iterator[Task]:
        """Yield the tasks of ``split`` in AppWorld's order.

        :raises DataError: there is no such split, it is empty, or the service cannot be asked.
        """
        name = self.config.training_split if split is Split.TRAIN else self.config.validation_split
        if name is None:
            return
        try:
            ids = self._client.task_ids(ENVIRONMENT, name, self._params)
        except EnvironmentFailed as e:
            raise DataError(f"the tasks of AppWorld's split {name!r}: {e}") from e
        if not ids:
            raise DataError(f"AppWorld's split {name!r} has no tasks; look at: astuner env doctor appworld")
        for task_id in ids:
            yield Task(task_id=task_id, env_type=ENVIRONMENT)
