"""The samples of one update as arrays, and how they are dealt out to optimizer steps.

Core's `token_weight`s are normalised over the whole batch.  A mini-batch is one optimizer step on a part of the
batch, and its loss should be what it would be had that part been the batch; so its weights are scaled up.

Invariant: leaving out samples that carry no gradient changes no scale, hence no gradient.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from astuner.contracts.types import Sample
from astuner_local.trainer.layout import MicroBatch


@dataclass(frozen=True)
class Batch:
    """Samples and what the trainer reads of them; lists run over samples, arrays over their trained tokens."""

    samples: Sequence[Sample]

    @cached_property
    def ids(self) -> list[np.ndarray]:
        return [np.asarray(s.input_ids, dtype=np.int64) for s in self.samples]

    @cached_property
    def trained(self) -> list[np.ndarray]:
        """Ascending positions of the trained tokens."""
        return [np.flatnonzero(np.asarray(s.loss_mask)) for s in self.samples]

    @cached_property
    def rollout_logprobs(self) -> list[np.ndarray]:
        return [np.asarray(s.logprobs, dtype=np.float32)[at] for s, at in zip(self.samples, self.trained, strict=True)]

    def carries_gradient(self, index: int, *, with_zero_advantage: bool) -> bool:
        sample = self.samples[index]
        advantage = with_zero_advantage or sample.advantage != 0
        return len(self.trained[index]) > 0 and sample.token_weight != 0 and advantage


def per_token(micro: MicroBatch, members: Sequence[int], columns: Sequence[np.ndarray]) -> Tensor:
    """Columns (one array per sample of the batch) as one float32 [N] in the order of `micro`'s trained tokens."""
    joined = np.concatenate([columns[members[i]] for i in micro.samples])
    return torch.from_numpy(joined.astype(np.float32, copy=False)).to(micro.owner.device)


def per_sample(micro: MicroBatch, members: Sequence[int], values: Sequence[float]) -> Tensor:
    """One value per sample of the batch, spread over `micro`'s trained tokens: float32 [N]."""
    mine = torch.tensor([values[members[i]] for i in micro.samples], dtype=torch.float32, device=micro.owner.device)
    return mine.index_select(0, micro.owner)


@dataclass(frozen=True)
class MiniBatch:
    """The samples of one optimizer step."""

    members: tuple[int, ...]
    """Indices into the batch's samples."""
    scale: float
    """What their token weights are multiplied with."""


def mini_batches(samples: Sequence[Sample], count: int, loss_agg_mode: str, rng: random.Random) -> list[MiniBatch]:
    """Deal the samples out to `count` optimizer steps at random, keeping groups together where there are enough.

    With fewer groups than steps, episodes are dealt out instead; an episode is never split, so with fewer episodes
    than steps there are fewer steps.  Under the ``seq-mean-token-sum`` modes a token's weight is a constant over the
    number of episodes, so a mini-batch is scaled by episodes; under the others the weights sum to 1 (or to the share
    that was scored), so it is scaled by the sum of weights.
    """
    if not samples:
        return []
    everyone = range(len(samples))
    if count == 1:
        return [MiniBatch(tuple(everyone), 1.0)]
    units: dict[str, list[int]] = {}
    for by in ("group_id", "episode_id"):
        units = {}
        for i in everyone:
            units.setdefault(getattr(samples[i], by), []).append(i)
        if len(units) >= count:
            break
    dealt = list(units.values())
    rng.shuffle(dealt)
    count = min(count, len(dealt))
    parts = [[i for unit in dealt[n::count] for i in unit] for n in range(count)]

    def size(members: Sequence[int]) -> float:
        if loss_agg_mode.startswith("seq-mean-token-sum"):
            return len({samples[i].episode_id for i in members})
        return sum(samples[i].token_weight * samples[i].trained_tokens for i in members)

    whole = size(everyone)
    return [MiniBatch(tuple(p), whole / size(p) if size(p) else 0.0) for p in parts]
