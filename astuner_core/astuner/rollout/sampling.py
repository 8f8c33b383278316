"""How an experiment samples, in training and in validation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from astuner.contracts.types import SamplingParams, Split

if TYPE_CHECKING:
    from astuner.config import Config


def sampling_for(config: Config, split: Split) -> SamplingParams:
    """`rollout.temperature`, `top_p` and `top_k` in training; those of `rollout.val_kwargs` in validation."""
    rollout = config.astuner.rollout
    how = rollout if split is Split.TRAIN else rollout.val_kwargs
    return SamplingParams(
        max_tokens=rollout.max_response_length_in_one_turn,
        temperature=how.temperature,
        top_p=how.top_p,
        top_k=how.top_k,
    )
