"""Handlers that VERL's trainer loads by name for data, samples, advantages and checkpoints; the session answers them.

``keys.yaml`` sets their names.  VERL submits prompts and samples finished groups.  Its prompts are *tickets* here: when
a group starts, core's `TaskSampler` selects the task of its ticket, so a run on VERL draws the same tasks as on any
other backbone, also after a resume.
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
"""Name of `advantages` in VERL's registry of estimators."""


class TicketDataset(Dataset[dict[str, Any]]):
    """Dataset of ``N`` tickets, for ``tickets:N`` in ``data.train_files`` or ``data.val_files``."""

    def __init__(self, data_files: Any, **verl_passes_more: Any) -> None:
        """:param data_files: ``tickets:N``; VERL passes the configured value, alone or in a list."""
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
    """VERL's agent loop manager, which starts groups and does not wait for them.

    In the synchronous mode nothing starts ahead: the groups of a step run while VERL samples them.
    """

    def generate_sequences(self, prompts: TensorDict) -> None:
        """Start a group for each ticket, from the training tasks unless ``prompts`` contains ``validate``."""
        uids = [str(_plain(uid)) for uid in prompts["uid"]]
        session.current().submitted(uids, validate="validate" in prompts and bool(_plain(prompts["validate"])))


class GroupBuffer:
    """VERL's replay buffer, which runs and returns n finished groups on request.

    Core decides which groups are trained on and what happens to the others (`Run.rollout`); VERL's own filters and
    refills are not used.
    """

    def __init__(self, **verl_passes_settings: Any) -> None:
        """Ignore VERL's settings; the session has all state."""

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, float]]:
        """Return the rows of ``batch_size`` groups, and no metrics, because the run publishes them.

        :param partition_id: ``train`` or ``val``.
        """
        run = session.current()
        batch = run.validate(global_steps) if partition_id == "val" else run.collect(global_steps)
        return batch, {}


@register_adv_est(ADVANTAGES)
def advantages(
    token_level_rewards: Tensor, response_mask: Tensor, index: Sequence[str], **verl_passes_more: Any
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns, both [rows, tokens], as computed by core.

    VERL's estimators receive token-level rewards and a group ID; they know neither episodes that fork nor agents with
    roles.  This one looks up the samples, requests their credit from core, and writes it to the tokens.

    :param token_level_rewards: [rows, tokens], minus the KL penalty if ``use_kl_in_reward`` is set.
    :param response_mask: [rows, tokens]; 1 where the model generated.
    :param index: ``uid`` of each row, set by `rows.publish`; rows that VERL adds as padding have other values.
    """
    known = [int(uid) if uid.isdigit() else None for uid in index]
    sums = token_level_rewards.sum(dim=1).tolist()
    by_row = session.current().credit({row: total for row, total in zip(known, sums, strict=True) if row is not None})
    column = torch.tensor([0.0 if row is None else by_row[row] for row in known], dtype=torch.float32)
    spread = column.unsqueeze(1) * response_mask
    return spread, spread


class SaveCallback(CheckpointCallback):
    """Callback that VERL calls after each checkpoint."""

    def on_save(
        self, trainer: Any, global_step: int, checkpoint_dir: str, async_save: bool = False, **kwargs: Any
    ) -> None:
        session.current().saved(global_step, Path(checkpoint_dir).absolute(), written=not async_save)


def _plain(value: Any) -> Any:
    """Return the value inside tensordict's wrapper, if there is one."""
    return getattr(value, "data", value)
