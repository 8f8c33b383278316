"""Tasks from environments, and the environment's own verdict as the reward.

The readers `env_service` and `environment` yield what an environment says its tasks are; the one asks the service, the
other runs the environment inside this process, for light ones and for breakpoints.  A task of the service is its id;
everything else comes when the environment is opened.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from astuner.config.schema import Section
from astuner.env_service import find_client
from astuner.errors import ConfigError, DataError, EnvironmentFailed, JudgeFailed, PluginError
from astuner.judge import Judge
from astuner.task_reader import TaskReader
from astuner.types import JudgeOutput, Split, Task, WorkflowOutput, WorkflowTask

if TYPE_CHECKING:
    from astuner.config import Config


class EnvironmentTasksConfig(Section):
    env_type: str = Field(min_length=1)
    """The environment: a registered name; for the reader `environment` also `path/to/file.py->Class`."""
    training_split: str = "train"
    """The environment's split to train on."""
    validation_split: str | None = "dev"
    """The environment's split to validate on; null for an experiment that does not validate."""


class _EnvironmentTasks(TaskReader):
    config: EnvironmentTasksConfig

    def __init__(
        self, config: EnvironmentTasksConfig, experiment: Config, disabled_plugins: Sequence[str] = ()
    ) -> None:
        """:param experiment: the whole config, for ``astuner.env_service``."""
        super().__init__(config)
        self._experiment = experiment
        self._disabled_plugins = disabled_plugins

    def read(self, split: Split) -> Iterator[Task]:
        """Yield the tasks of ``split`` in the environment's order.

        :raises DataError: the environment has no such split, or none of its tasks; or it cannot be asked.
        """
        name = self.config.training_split if split is Split.TRAIN else self.config.validation_split
        if name is None:
            return
        tasks = 0
        for task in self._tasks(name):
            tasks += 1
            yield task
        if not tasks:
            key = "training_split" if split is Split.TRAIN else "validation_split"
            raise DataError(
                f"the environment {self.config.env_type!r} has no tasks in the split {name!r} "
                f"(astuner.task_reader.{self._experiment.astuner.task_reader.type}.{key})"
            )

    def _tasks(self, split: str) -> Iterator[Task]:
        raise NotImplementedError


class EnvServiceTaskReader(_EnvironmentTasks):
    """Asks the environment service for the ids of a split's tasks."""

    def __init__(
        self, config: EnvironmentTasksConfig, experiment: Config, disabled_plugins: Sequence[str] = ()
    ) -> None:
        """:raises ConfigError: it is not known where the service is."""
        super().__init__(config, experiment, disabled_plugins)
        self._client = find_client(experiment)

    def _tasks(self, split: str) -> Iterator[Task]:
        name = self.config.env_type
        try:
            ids = self._client.task_ids(name, split, self._experiment.astuner.env_service.params)
        except EnvironmentFailed as e:
            raise DataError(f"the tasks of {name!r}, split {split!r}: {e}") from e
        for task_id in ids:
            yield Task(task_id=task_id, env_type=name)


class EnvironmentTaskReader(_EnvironmentTasks):
    """Asks the environment's class, in this process."""

    def _tasks(self, split: str) -> Iterator[Task]:
        name = self.config.env_type
        try:
            kind = self._experiment.resolve("environment", name, self._disabled_plugins)
        except PluginError as e:
            raise ConfigError(f"astuner.task_reader.environment.env_type: {e}") from e
        try:
            for task in kind.tasks(split, self._experiment.astuner.env_service.params):
                yield task if task.env_type == name else replace(task, env_type=name)
        except ValueError as e:
            raise DataError(f"the tasks of {name!r}, split {split!r}: {e}") from e


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
