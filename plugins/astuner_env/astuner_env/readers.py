"""Read tasks from environments, and use the environment's score as the reward.

The readers `env_service` and `environment` yield the tasks that an environment lists. The first calls the service; the
second runs the environment in this process, for light environments and for debugging. A task from the service consists
of its ID; the prompt comes when the environment is reset. A plugin with its own task reader for an environment inherits
from `ServiceTasks`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from astuner.contracts.building import BuildContext
from astuner.contracts.errors import ConfigError, DataError, EnvironmentFailed, JudgeFailed, PluginError
from astuner.contracts.judge import Judge
from astuner.contracts.section import Section
from astuner.contracts.task_reader import TaskReader
from astuner.contracts.types import JudgeOutput, Split, Task, WorkflowOutput, WorkflowTask
from astuner_env.env_service.client import find_client
from astuner_http.client import HttpError

if TYPE_CHECKING:
    from astuner import Config
    from astuner_env.env_service.client import EnvClient


class NoSuchSplit(DataError):
    """Raised if the environment does not have the split."""


class SplitsConfig(Section):
    """Splits of an environment."""

    training_split: str = Field("train", min_length=1)
    """Split to train on."""
    validation_split: str | list[str] | None = Field(["dev", "validation"])
    """Split to validate on, or several to use the first that exists; `null` disables validation."""


class EnvironmentTasks(TaskReader):
    """Tasks of one environment."""

    of_environments = True
    config: SplitsConfig
    environment_begins = True
    """The first messages of a task come from its environment, not from the data."""

    @classmethod
    def from_config(cls, section: Any, context: BuildContext) -> EnvironmentTasks:
        return cls(section, context.config)

    def __init__(self, config: SplitsConfig, experiment: Config, env_type: str = "") -> None:
        """Create a reader.

        :param experiment: Complete configuration, for ``astuner.env_service``.
        :param env_type: Name of the environment. Empty: taken from the section, as in `EnvironmentTasksConfig`.
        """
        super().__init__(config)
        self.experiment = experiment
        self.env_type: str = env_type or getattr(config, "env_type", "")

    def read(self, split: Split) -> Iterator[Task]:
        """Yield the tasks of ``split`` in the environment's order.

        :raises DataError: The split is missing or empty, or the environment failed; the message names the keys.
        """
        key = "training_split" if split is Split.TRAIN else "validation_split"
        wanted = getattr(self.config, key)
        names = [wanted] if isinstance(wanted, str) else wanted or []
        tasks: list[Task] = []
        for name in names:
            try:
                tasks = list(self.tasks(name))
                break
            except DataError as e:
                if name == names[-1] or not isinstance(e, NoSuchSplit):
                    which = " or ".join(map(repr, names))
                    raise DataError(f"{self._asked_for(which, key)}: {e}") from e
        if names and not tasks:
            raise DataError(f"{self._asked_for(repr(name), key)}: the split is empty")
        yield from tasks

    @abstractmethod
    def tasks(self, split: str) -> Iterable[Task]:
        """Return the tasks of a split.

        :raises NoSuchSplit: The split does not exist.
        :raises DataError: The tasks could not be read.
        """

    def _asked_for(self, split: str, key: str) -> str:
        return f"the tasks of {self.env_type!r}{self._written('env_type')}, split {split}{self._written(key)}"

    def _written(self, key: str) -> str:
        """Return `` (full key, file:line:column)`` for messages, or an empty string if the reader lacks the key."""
        if key not in type(self.config).model_fields:
            return ""
        name = f"astuner.task_reader.{self.experiment.astuner.task_reader.type}.{key}"
        place = self.experiment.origins.get(name)
        return f" ({name}, {place})" if place else f" ({name})"


class ServiceTasks(EnvironmentTasks):
    """Task reader that gets task IDs from the environment service, once per split."""

    @property
    def elsewhere(self) -> str:
        return "an environment service"

    @cached_property
    def _client(self) -> EnvClient:
        return find_client(self.experiment)

    def tasks(self, split: str) -> Iterator[Task]:
        """Yield the tasks of a split.

        :raises ConfigError: No environment service is configured.
        """
        try:
            ids = self._client.task_ids(self.env_type, split, self.experiment.astuner.env_service.params)
        except EnvironmentFailed as e:
            refused = isinstance(e.__cause__, HttpError) and e.__cause__.status in (400, 404)
            raise (NoSuchSplit if refused else DataError)(str(e)) from e
        for task_id in ids:
            yield Task(task_id=task_id, env_type=self.env_type)


class EnvironmentTasksConfig(SplitsConfig):
    """Environment and splits to read tasks from."""

    env_type: str = Field(min_length=1)
    """Registered name of the environment; for the reader `environment` also `path/to/file.py->Class`."""


class EnvServiceTaskReader(ServiceTasks):
    """Task reader for environments in the environment service."""


class EnvironmentTaskReader(EnvironmentTasks):
    """Task reader for environments in this process."""

    def tasks(self, split: str) -> Iterator[Task]:
        name = self.env_type
        try:
            kind = self.experiment.resolve("environment", name)
        except PluginError as e:
            raise ConfigError(f"astuner.task_reader.environment.env_type: {e}") from e
        try:
            for task in kind.tasks(split, self.experiment.astuner.env_service.params):
                yield task if task.env_type == name else replace(task, env_type=name)
        except ValueError as e:
            raise NoSuchSplit(str(e)) from e


class EnvServiceJudge(Judge):
    """Judge that uses the environment's score as the reward."""

    wants_evaluation: ClassVar[bool] = True

    def judge(self, workflow_task: WorkflowTask, output: WorkflowOutput) -> JudgeOutput:
        """Return the environment's evaluation after the workflow; the environment defines the scale."""
        evaluation = output.evaluation
        if evaluation is None:
            raise JudgeFailed(
                f"The judge env_service needs an environment, but task {workflow_task.task.task_id!r} has no env_type. "
                "Use a task reader that sets it, such as env_service."
            )
        return JudgeOutput(reward=evaluation.score, is_success=evaluation.is_success)
