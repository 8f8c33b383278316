"""Read the task IDs of AppWorld's splits from the environment service; the text of a task is not read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from astuner_env.readers import ServiceTasks, SplitsConfig

if TYPE_CHECKING:
    from astuner import Config


class AppWorldTasksConfig(SplitsConfig):
    """Splits of AppWorld to read."""

    training_split: str = Field("train", min_length=1)
    """Split to train on: train, dev, test_normal or test_challenge."""
    validation_split: str | None = "dev"
    """Split to validate on; `null` disables validation. Report results on the test splits."""


class AppWorldTaskReader(ServiceTasks):
    """Task reader for AppWorld."""

    def __init__(self, config: AppWorldTasksConfig, experiment: Config) -> None:
        super().__init__(config, experiment, "appworld")
