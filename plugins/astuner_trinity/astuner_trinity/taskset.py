"""Where Trinity's explorer reads its tasks: they are the run's own draws, a batch for each step.

Set as the ``storage_type`` of the taskset.  A Trinity task is a whole group: the attempts at one draw.
"""

from __future__ import annotations

from typing import Any

from trinity.buffer.buffer_reader import BufferReader
from trinity.common.config import StorageConfig
from trinity.common.workflows import Task

from astuner import Draw
from astuner_trinity import mailbox, requests
from astuner_trinity.workflow import GroupWorkflow

Drawn = tuple[int, list[Draw], int]
"""A step, its draws, and the attempts at each: what the run answers."""


class DrawReader(BufferReader):
    """Asks the run for draws; what was drawn is in the run's state, none of it here."""

    def __init__(self, config: StorageConfig) -> None:
        """Everything that is to be known the run knows."""

    async def read(self, batch_size: int | None = None, **kwargs: Any) -> list[Task]:
        """The groups of the next step.

        :raises StopAsyncIteration: that was the last one.
        """
        drawn = await mailbox.ask(requests.NextDraws())
        if not drawn[1]:
            raise StopAsyncIteration
        return group_tasks(drawn)

    def __len__(self) -> int:
        return 0

    def state_dict(self) -> dict[str, int]:
        return {"current_index": 0}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Nothing: see the class."""


def group_tasks(drawn: Drawn, *, validation: bool = False) -> list[Task]:
    """Trinity's tasks for draws, one each."""
    step, draws, repeat = drawn
    return [
        Task(workflow=GroupWorkflow, repeat_times=repeat, raw_task={"step": step, "draw": draw}, is_eval=validation)
        for draw in draws
    ]
