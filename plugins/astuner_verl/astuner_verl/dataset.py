"""verl asks its data loader for prompts; it gets tickets.

What a ticket stands for is decided by core's `TaskSampler` when the group starts, so that a run on verl draws exactly
what the same run draws on any other backbone, and continues there after a resume.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset


class TicketDataset(Dataset[dict[str, Any]]):
    """As many tickets as ``data.train_files`` or ``data.val_files`` says: ``tickets:N``."""

    def __init__(self, data_files: Any, **verl_passes_more: Any) -> None:
        """:param data_files: ``tickets:N``; verl hands over what the config says, alone or in a list."""
        text = data_files if isinstance(data_files, str) else next(iter(data_files))
        self._tickets = int(text.removeprefix("tickets:"))

    def __len__(self) -> int:
        return self._tickets

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "raw_prompt": [],  # verl counts a batch by this column
            "index": index,
            "data_source": "astuner",
            "dummy_tensor": torch.zeros(1, dtype=torch.uint8),  # a batch needs a tensor to have a size
        }
