"""Advantages as core computes them, under the name ``astuner`` in verl's registry of estimators.

verl's estimators see token-level rewards and a group's id; they cannot know of episodes that fork, or of agents with
roles.  So this one looks the samples up, asks core for their credit, and writes it on the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import register_adv_est

from astuner_verl import session

NAME = "astuner"


@register_adv_est(NAME)
def advantages(
    token_level_rewards: Tensor, response_mask: Tensor, index: Sequence[str], **verl_passes_more: Any
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, both [rows, tokens].

    :param token_level_rewards: [rows, tokens], with the KL penalty taken off where ``use_kl_in_reward`` says so.
    :param response_mask: [rows, tokens]; 1 where the model generated.
    :param index: a row's ``uid``, as `rows.publish` set it; rows that verl adds to fill a batch have other ones.
    """
    known = [int(uid) if uid.isdigit() else None for uid in index]
    sums = token_level_rewards.sum(dim=1).tolist()
    by_row = session.current().credit({row: total for row, total in zip(known, sums, strict=True) if row is not None})
    column = torch.tensor([0.0 if row is None else by_row[row] for row in known], dtype=torch.float32)
    spread = column.unsqueeze(1) * response_mask
    return spread, spread
