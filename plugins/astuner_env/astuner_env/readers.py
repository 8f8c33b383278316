"""Tasks from environments, and the environment's own verdict as the reward.

The readers `env_service` and `environment` yield what an environment says its tasks are; the one asks the service, the
other runs the environment inside this process, for light ones and for breakpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from astuner.contracts.building import BuildContext
from astuner.contracts.errors import ConfigError, JudgeFailed, PluginError
from astuner.contracts.judge import Judge
from astuner.contracts.types import JudgeOutput, Task, WorkflowOutput, WorkflowTask
from astuner_env.env_service.tasks import EnvironmentTasks, NoSuchSplit, ServiceTasks, SplitsConfig

if TYPE_CHECKING:
    from astuner.config import Config


class EnvironmentTasksConfig(SplitsConfig):
    env_type: str = Field(min_length=1)
    """The environment: a registered name; for the reader `environment` also `path/to/file.py->Class`."""


class EnvServiceTaskReader(ServiceTasks):
    """Asks the environment service."""

    @classmethod
    def from_config(cls, section: Any, context: BuildContext) -> EnvServiceTaskReader:
        return cls(section, context.config)

    def __init__(self, config: EnvironmentTasksConfig, experiment: Config) -> None:
        super().__init__(config, experiment, config.env_type)


class EnvironmentTaskReader(EnvironmentTasks):
    """Asks the environment's class, in this process."""

    @classmethod
    def from_config(cls, section: Any, context: BuildContext) -> EnvironmentTaskReader:
        return cls(section, context.config)

    def __init__(self, config: EnvironmentTasksConfig, experiment: Config) -> None:
        super().__init__(config, experiment, config.env_type)

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
