"""From samples to forward passes: which tokens are computed, where, and what is read off them.

The samples of a batch share long prefixes (the system prompt, a group's task, the history before a fork).  Sorted as
sequences, each one's longest common prefix with *any* earlier one is its common prefix with its predecessor; so a
prefix trie is the sorted list in which every sample adds only what its predecessor does not have.  Linear layers run
over unique tokens once; attention gathers each sample's path (see `attention`).  Nothing is padded, and nothing
after a sample's last trained token is computed at all.

Invariant: for every trained token, exactly one `source` row holds the hidden state that predicts it, computed from
exactly the tokens that precede it in its sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from astuner_local.trainer.attention import PackedAttention, Row

PrefixSharing = Literal["auto", "always", "never"]


@dataclass(frozen=True)
class MicroBatch:
    """One forward (and backward) pass. T unique tokens, N trained tokens, S samples."""

    samples: tuple[int, ...]
    """Which of the given sequences are in it."""
    input_ids: Tensor
    """int64 [T]."""
    position_ids: Tensor
    """int64 [T]: place in the sample, from 0."""
    attention: PackedAttention
    source: Tensor
    """int64 [N]: the flat token whose hidden state predicts the trained token; by sample, then by position."""
    target: Tensor
    """int64 [N]: the trained token's id."""
    owner: Tensor
    """int64 [N]: which of `samples` it belongs to, 0 … S-1."""
    raw_tokens: int
    """Tokens of the samples up to what is computed, shared or not; `raw_tokens / T` is what sharing saves."""


def plan(
    sequences: Sequence[np.ndarray],
    trained: Sequence[np.ndarray],
    *,
    budget: int | None = None,
    sharing: PrefixSharing = "auto",
    hidden_size: int,
    device: torch.device | str = "cpu",
) -> list[MicroBatch]:
    """Lay out sequences in as few computed tokens as the budget allows.

    :param sequences: token ids, integer [length] each.
    :param trained: ascending positions of each sequence's trained tokens; at least one, none of them 0.
    :param budget: most unique tokens per micro-batch; a longer sample gets a micro-batch of its own. None: no limit.
    :param sharing: compute shared prefixes once `always`, `never`, or (`auto`) where that costs fewer operations.
    :param hidden_size: of the model; weighs linear layers against attention for `auto`.
    """
    ids = [np.asarray(s, dtype=np.int64)[: int(t[-1])] for s, t in zip(sequences, trained, strict=True)]
    order = sorted(range(len(ids)), key=lambda i: ids[i].astype(">i8").tobytes())  # memcmp of big-endian = by tokens
    shared = [0] * len(order)
    for at in range(1, len(order)) if sharing != "never" else ():
        mine = ids[order[at]]
        common = _common_prefix(ids[order[at - 1]], mine)
        if sharing == "always" or _sharing_pays(common, len(mine), hidden_size):
            shared[at] = common
    lengths = [len(ids[i]) for i in order]
    return [
        _lay_out(order[a:b], [0, *shared[a + 1 : b]], ids, sequences, trained, torch.device(device))
        for a, b in _cut(lengths, shared, budget)
    ]


def _common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    different = a[:n] != b[:n]
    return int(different.argmax()) if different.any() else n


def _sharing_pays(common: int, length: int, hidden_size: int) -> bool:
    """Whether computing `common` of `length` tokens once saves more than it costs.

    Per layer and token, linear layers take about 24 h² operations (h = hidden size).  Attention of the whole sample
    with a causal kernel takes 2 h length²; of the new queries only, under a mask that no kernel skips, 4 h (length -
    common) length.
    """
    linear = 24 * hidden_size**2 * common
    return linear + 2 * hidden_size * length**2 > 4 * hidden_size * (length - common) * length


def _cut(lengths: Sequence[int], shared: Sequence[int], budget: int | None) -> list[tuple[int, int]]:
    """Cut the sorted samples into runs of at most `budget` unique tokens, recomputing as few shared tokens as possible.

    A cut before sample i makes its shared prefix be computed again.  Dynamic programme over the cuts: fewest
    computed tokens, then fewest runs.
    """
    total = len(lengths)
    if budget is None or total == 0:
        return [(0, total)] if total else []
    best: list[tuple[int, int]] = [(0, 0)]  # (tokens, runs) for the first n samples
    start = [0]
    for end in range(1, total + 1):
        candidates = []
        tokens = 0
        for begin in range(end - 1, -1, -1):
            unique = tokens + lengths[begin]
            if begin < end - 1 and unique > budget:
                # longer runs may still fit: a long sample that shares most of its prefix costs little inside a run
                if tokens > budget:
                    break
            else:
                candidates.append((best[begin][0] + unique, best[begin][1] + 1, begin))
            tokens += lengths[begin] - shared[begin]
        cost, runs, begin = min(candidates)
        best.append((cost, runs))
        start.append(begin)
    cuts = []
    end = total
    while end:
        cuts.append((start[end], end))
        end = start[end]
    return cuts[::-1]


def _lay_out(
    members: Sequence[int],
    shared: Sequence[int],
    ids: Sequence[np.ndarray],
    sequences: Sequence[np.ndarray],
    trained: Sequence[np.ndarray],
    device: torch.device,
) -> MicroBatch:
    """One micro-batch of `members` (sorted), of which member i takes its first `shared[i]` tokens from member i-1."""
    tokens = 0
    new_ids, new_positions, rows, source, target, owner = [], [], [], [], [], []
    path = np.zeros(0, dtype=np.int64)
    for place, (member, common) in enumerate(zip(members, shared, strict=True)):
        mine = ids[member]
        new = len(mine) - common
        path = np.concatenate([path[:common], np.arange(tokens, tokens + new)])
        if new:
            rows.append(Row(first=tokens, queries=new, path=path))
            new_ids.append(mine[common:])
            new_positions.append(np.arange(common, len(mine)))
        at = np.asarray(trained[member])
        source.append(path[at - 1])
        target.append(np.asarray(sequences[member])[at])
        owner.append(np.full(len(at), place))
        tokens += new

    def tensor(parts: Sequence[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts).astype(np.int64, copy=False)).to(device)

    return MicroBatch(
        samples=tuple(members),
        input_ids=tensor(new_ids),
        position_ids=tensor(new_positions),
        attention=PackedAttention(rows, tokens, device),
        source=tensor(source),
        target=tensor(target),
        owner=tensor(owner),
        raw_tokens=sum(len(ids[m]) for m in members),
    )
