"""The task reader `conversations`: placeholders, since the users bring the tasks."""

from __future__ import annotations

from collections.abc import Iterator

from astuner.contracts.task_reader import TaskReader
from astuner.contracts.types import Split, Task
from astuner_gateway.feedback.settings import ConversationsConfig

QUERY = "(what a user asks)"
"""For logs; no model gets to see it."""


class ConversationsTaskReader(TaskReader):
    """Numbered empty tasks for training; none for validation, which nobody is there to rate."""

    config: ConversationsConfig

    def read(self, split: Split) -> Iterator[Task]:
        if split is Split.TRAIN:
            yield from (Task(task_id=f"conversation-{n}", main_query=QUERY) for n in range(self.config.count))
