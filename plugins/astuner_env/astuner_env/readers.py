"""Tasks from environments, and the environment's own verdict as the reward.

The readers `env_service` and `environment` yield what an environment says its tasks are; the one asks the service, the
other runs the environment inside this process, for light ones and for breakpoints.  A task of the service is its id;
everything else comes when the environment is opened.  A plugin whose environment has a reader of its own inherits from
`ServiceTasks`.
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
    """The environment was asked, and has no split of this name."""


class SplitsConfig(Section):
    training_split: str = Field("train", min_length=1)
    """The environment's split to train on."""
    validation_split: str | list[str] | None = Field(["dev", "validation"])
    """The environment's split to validate on, of several the first that it has; null for no validation."""


class EnvironmentTasks(TaskReader):
    """The tasks of one environment."""

    of_environments = True
    config: SplitsConfig
    environment_begins = True
    """The first messages of a task are what its environment says when it starts, and not the data's."""

    @classmethod
    def from_config(cls, section: Any, context: BuildContext) -> EnvironmentTasks:
        return cls(section, context.config)

    def __init__(self, config: SplitsConfig, experiment: Config, env_type: str = "") -> None:
        """
        :param experiment: the whole config, for ``astuner.env_service``.
        :param env_type: the environment; empty: the section says it, as `EnvironmentTasksConfig` does.
        """
        super().__init__(config)
        self.experiment = experiment
        self.env_type: str = env_type or getattr(config, "env_type", "")

    def read(self, split: Split) -> Iterator[Task]:
        """Yield the tasks of ``split`` in the environment's order.

        :raises DataError: the environment has no such split, or no tasks in it; or it cannot be asked. Names the keys.
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
            raise DataError(f"{self._asked_for(repr(name), key)}: there are none")
        yield from tasks

    @abstractmethod
    def tasks(self, split: str) -> Iterable[Task]:
        """The tasks of the environment's split of this name.

        :raises NoSuchSplit: there is none.
        :raises DataError: they are not known; why.
        """

    def _asked_for(self, split: str, key: str) -> str:
        return f"the tasks of {self.env_type!r}{self._written('env_type')}, split {split}{self._written(key)}"

    def _written(self, key: str) -> str:
        """`` (the key's full name, file:line:column)`` for messages; empty where the reader has no such key."""
        if key not in type(self.config).model_fields:
            return ""
        name = f"astuner.task_reader.{self.experiment.astuner.task_reader.type}.{key}"
        place = self.experiment.origins.get(name)
        return f" ({name}, {place})" if place else f" ({name})"


class ServiceTasks(EnvironmentTasks):
    """Asks the environment service for the ids of a split's tasks, once per split."""

    @property
    def elsewhere(self) -> str:
        return "an environment service"

    @cached_property
    def _client(self) -> EnvClient:
        return find_client(self.experiment)

    def tasks(self, split: str) -> Iterator[Task]:
        """:raises ConfigError: it is not known where the service is."""
        try:
            ids = self._client.task_ids(self.env_type, split, self.experiment.astuner.env_service.params)
        except EnvironmentFailed as e:
            refused = isinstance(e.__cause__, HttpError) and e.__cause__.status in (400, 404)
            raise (NoSuchSplit if refused else DataError)(str(e)) from e
        for task_id in ids:
            yield Task(task_id=task_id, env_type=self.env_type)


class EnvironmentTasksConfig(SplitsConfig):
    env_type: str = Field(min_length=1)
    """The environment: a registered name; for the reader `environment` also `path/to/file.py->Class`."""


class EnvServiceTaskReader(ServiceTasks):
    """Asks the environment service."""


class EnvironmentTaskReader(EnvironmentTasks):
    """Asks the environment's class, in this process."""

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
    """The environment's own score is the reward."""

    wants_evaluation: ClassVar[bool] = True

    def judge(self, workflow_task: WorkflowTask, output: WorkflowOutput) -> JudgeOutput:
        """What the environment said when the workflow had ended; it says what the scale is."""
        evaluation = output.evaluation
        if evaluation is None:
            raise JudgeFailed(
                f"task {workflow_task.task.task_id!r} has no environment (env_type), so the judge env_service has "
                "nothing to ask; use a task reader that sets it, such as env_service"
            )
        return JudgeOutput(reward=evaluation.score, is_success=evaluation.is_success)
