"""The tasks of AppWorld's splits, as the environment service lists them: the ids, and nothing of the tasks' text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from astuner_env.readers import ServiceTasks, SplitsConfig

if TYPE_CHECKING:
    from astuner import Config


class AppWorldTasksConfig(SplitsConfig):
    training_split: str = Field("train", min_length=1)
    """AppWorld's split to train on: train, dev, test_normal or test_challenge."""
    validation_split: str | None = "dev"
    """The split to validate on; null for an experiment that does not validate. Report results on the test splits."""


class AppWorldTaskReader(ServiceTasks):
    """Asks the service for AppWorld's."""

    def __init__(self, config: AppWorldTasksConfig, experiment: Config) -> None:
        super().__init__(config, experiment, "appworld")
