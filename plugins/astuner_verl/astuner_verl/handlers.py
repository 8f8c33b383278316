"""What VERL's trainer asks for by name: data, samples, advantages, checkpoints; all of it is the session's to answer.

``keys.yaml`` tells it their names.  VERL submits prompts and samples finished groups.  Its prompts are *tickets* here:
what a ticket stands for is decided by core's `TaskSampler` when the group starts, so that a run on VERL draws exactly
what the same run draws on any other backbone, and continues there after a resume.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.utils.data import Dataset
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.checkpoint_callback import CheckpointCallback
from verl.trainer.ppo.core_algos import register_adv_est

from astuner_verl import session

ADVANTAGES = "astuner"
"""The name of `advantages` in VERL's registry of estimators."""


class TicketDataset(Dataset[dict[str, Any]]):
    """As many tickets as ``data.train_files`` or ``data.val_files`` says: ``tickets:N``."""

    def __init__(self, data_files: Any, **verl_passes_more: Any) -> None:
        """:param data_files: ``tickets:N``; VERL hands over what the config says, alone or in a list."""
        text = data_files if isinstance(data_files, str) else next(iter(data_files))
        self._tickets = int(text.removeprefix("tickets:"))

    def __len__(self) -> int:
        return self._tickets

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "raw_prompt": [],  # VERL counts a batch by this column
            "index": index,
            "data_source": "astuner",
            "dummy_tensor": torch.zeros(1, dtype=torch.uint8),  # a batch needs a tensor to have a size
        }


class EpisodeManager:
    """VERL's agent loop manager: it is told to begin groups, and never waited for.

    In the synchronous mode there is nothing to begin ahead: the groups of a step run while VERL samples them.
    """

    def generate_sequences(self, prompts: TensorDict) -> None:
        """Begin a group for each ticket, of the training tasks unless ``prompts`` says ``validate``."""
        uids = [str(_plain(uid)) for uid in prompts["uid"]]
        session.current().submitted(uids, validate="validate" in prompts and bool(_plain(prompts["validate"])))


class GroupBuffer:
    """VERL's replay buffer: it answers a request for n finished groups, which run when they are asked for.

    Which groups are trained on, and what becomes of the others, is core's to say (`Run.rollout`); VERL's own filters
    and refills are not used.
    """

    def __init__(self, **verl_passes_settings: Any) -> None:
        """Everything that is to be known is in the session."""

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, float]]:
        """The rows of ``batch_size`` groups, and metrics (none: ours are the run's to publish).

        :param partition_id: ``train`` or ``val``.
        """
        run = session.current()
        batch = run.validate(global_steps) if partition_id == "val" else run.collect(global_steps)
        return batch, {}


@register_adv_est(ADVANTAGES)
def advantages(
    token_level_rewards: Tensor, response_mask: Tensor, index: Sequence[str], **verl_passes_more: Any
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, both [rows, tokens], as core computes them.

    VERL's estimators see token-level rewards and a group's id; they cannot know of episodes that fork, or of agents
    with roles.  So this one looks the samples up, asks core for their credit, and writes it on the tokens.

    :param token_level_rewards: [rows, tokens], with the KL penalty taken off where ``use_kl_in_reward`` says so.
    :param response_mask: [rows, tokens]; 1 where the model generated.
    :param index: a row's ``uid``, as `rows.publish` set it; rows that VERL adds to fill a batch have other ones.
    """
    known = [int(uid) if uid.isdigit() else None for uid in index]
    sums = token_level_rewards.sum(dim=1).tolist()
    by_row = session.current().credit({row: total for row, total in zip(known, sums, strict=True) if row is not None})
    column = torch.tensor([0.0 if row is None else by_row[row] for row in known], dtype=torch.float32)
    spread = column.unsqueeze(1) * response_mask
    return spread, spread


class SaveCallback(CheckpointCallback):
    """VERL calls it after each checkpoint."""

    def on_save(
        self, trainer: Any, global_step: int, checkpoint_dir: str, async_save: bool = False, **kwargs: Any
    ) -> None:
        session.current().saved(global_step, Path(checkpoint_dir).absolute(), written=not async_save)


def _plain(value: Any) -> Any:
    """What tensordict has wrapped, if it has."""
    return getattr(value, "data", value)
