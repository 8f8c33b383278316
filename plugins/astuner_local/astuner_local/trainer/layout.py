"""Lay out samples for forward passes: which tokens are computed, where, and which outputs are used.

The samples of a batch share long prefixes (the system prompt, a group's task, the history before a fork).  Sorted as
sequences, each one's longest common prefix with *any* earlier one is its common prefix with its predecessor; so a
prefix trie is the sorted list in which every sample adds only tokens that its predecessor lacks.  Linear layers run
once over unique tokens, without padding, and tokens after a sample's last trained token are not computed.

Only attention needs separate sequences, so it gathers them: a *row* is a run of consecutive flat tokens (the queries)
with the path of all tokens that they may attend to (the keys), which may start with tokens of other rows.  Rows of
similar size share one padded rectangle (a bucket), so one long row does not pad all others.

Invariants: attention returns one vector per flat token, and token t of a path depends only on the path's tokens 0 … t;
for every trained token, exactly one `source` row holds the hidden state that predicts it, computed from exactly the
tokens that precede it in its sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

PrefixSharing = Literal["auto", "always", "never"]
_BUCKET_OVERHEAD = 16_384
"""Padded score entries that cost as much as one more bucket; measured on the tiny model, not critical."""


@dataclass(frozen=True)
class MicroBatch:
    """One forward (and backward) pass. T unique tokens, N trained tokens, S samples."""

    samples: tuple[int, ...]
    """Indices of its sequences."""
    input_ids: Tensor
    """int64 [T]."""
    position_ids: Tensor
    """int64 [T]: position in the sample, from 0."""
    attention: PackedAttention
    source: Tensor
    """int64 [N]: flat token whose hidden state predicts the trained token; by sample, then by position."""
    target: Tensor
    """int64 [N]: ID of the trained token."""
    owner: Tensor
    """int64 [N]: index in `samples`, 0 … S-1."""
    raw_tokens: int
    """Tokens of the samples including shared ones; `raw_tokens / T` is the saving by sharing."""


def plan(
    sequences: Sequence[np.ndarray],
    trained: Sequence[np.ndarray],
    *,
    budget: int | None = None,
    sharing: PrefixSharing = "auto",
    hidden_size: int,
    device: torch.device | str = "cpu",
) -> list[MicroBatch]:
    """Lay out sequences with as few computed tokens as the budget allows.

    :param sequences: Token IDs, integer [length] each.
    :param trained: Ascending positions of each sequence's trained tokens; at least one, none of them 0.
    :param budget: Most unique tokens per micro-batch; a longer sample gets its own micro-batch. None: no limit.
    :param sharing: Compute shared prefixes once `always`, `never`, or (`auto`) if that costs fewer operations.
    :param hidden_size: Hidden size of the model; weighs linear layers against attention for `auto`.
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
    """Return whether computing `common` of `length` tokens once saves more than it costs.

    Per layer and token, linear layers take about 24 h² operations (h = hidden size).  Attention of the full sample with
    a causal kernel takes 2 h length²; of the new queries only, under a mask that no kernel skips, 4 h (length - common)
    length.
    """
    linear = 24 * hidden_size**2 * common
    return linear + 2 * hidden_size * length**2 > 4 * hidden_size * (length - common) * length


def _cut(lengths: Sequence[int], shared: Sequence[int], budget: int | None) -> list[tuple[int, int]]:
    """Cut the sorted samples into runs of at most `budget` unique tokens, recomputing as few shared tokens as possible.

    A cut before sample i makes its shared prefix be computed again.  Dynamic program over the cuts: fewest computed
    tokens, then fewest runs.
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
                # longer runs may still fit: a long sample that shares most of its prefix adds little to a run
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
    """Return one micro-batch of `members` (sorted), of which member i takes its first `shared[i]` tokens from i-1."""
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


# ------------------------------------------------------------------------------------------------------ attention


@dataclass(frozen=True)
class Row:
    """One run of queries and the keys that they may attend to."""

    first: int
    """Flat index of the first query; the queries are ``first … first + queries - 1``."""
    queries: int
    path: np.ndarray
    """Flat indices of all tokens from the sequence's start to the last query, int64 [keys]."""

    @property
    def keys(self) -> int:
        return len(self.path)

    @property
    def is_whole(self) -> bool:
        """Whether the queries cover the full path, so that a plain causal kernel applies without a mask."""
        return self.queries == len(self.path)


def bucket(rows: Sequence[Row]) -> list[list[Row]]:
    """Group rows so that padding each group to its longest queries and keys wastes little."""
    buckets: list[list[Row]] = []
    for whole in (True, False):
        wasted = 0
        current: list[Row] = []
        widest = 0
        for row in sorted((r for r in rows if r.is_whole is whole), key=lambda r: (r.queries, r.keys), reverse=True):
            keys = max(widest, row.keys)
            area = (current[0].queries if current else row.queries) * keys
            widening = (keys - widest) * current[0].queries * len(current) if current else 0
            waste = area - row.queries * row.keys + widening
            if current and wasted + waste > _BUCKET_OVERHEAD:
                buckets.append(current)
                current, wasted, waste, keys = [], 0, 0, row.keys
            current.append(row)
            wasted += waste
            widest = keys
        if current:
            buckets.append(current)
    return buckets


class _Bucket:
    """Gather indices, and a mask if needed, of one padded rectangle of rows."""

    def __init__(self, rows: Sequence[Row], device: torch.device) -> None:
        self.rows, self.queries, self.keys = len(rows), max(r.queries for r in rows), max(r.keys for r in rows)
        query_index = np.zeros((self.rows, self.queries), dtype=np.int64)
        key_index = np.zeros((self.rows, self.keys), dtype=np.int64)
        position = np.zeros((self.rows, self.queries), dtype=np.int64)
        for i, row in enumerate(rows):
            query_index[i, : row.queries] = row.path[-row.queries :]
            key_index[i, : row.keys] = row.path
            position[i, : row.queries] = np.arange(row.keys - row.queries, row.keys)
        self.is_causal = rows[0].is_whole
        self.query_index = torch.from_numpy(query_index.reshape(-1)).to(device)
        self.key_index = self.query_index if self.is_causal else torch.from_numpy(key_index.reshape(-1)).to(device)
        self._position = torch.from_numpy(position).to(device)
        self._bias: Tensor | None = None

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """Return 0 where a query may attend, -inf elsewhere, [rows, 1, queries, keys]; cached for all layers."""
        if self.is_causal:
            return None
        if self._bias is None or self._bias.dtype != dtype:
            unseen = torch.arange(self.keys, device=self._position.device) > self._position[:, None, :, None]
            self._bias = torch.zeros(unseen.shape, dtype=dtype, device=unseen.device).masked_fill_(unseen, -torch.inf)
        return self._bias


class PackedAttention:
    """``attention(q[T, H, D], k[T, KV, D], v[T, KV, D]) -> [T, H * D]`` for the rows of one forward pass.

    :param rows: Rows whose queries cover every flat token exactly once.
    :param tokens: T.
    """

    def __init__(self, rows: Sequence[Row], tokens: int, device: torch.device) -> None:
        groups = bucket(rows)
        self._buckets = [_Bucket(group, device) for group in groups]
        where = np.full(tokens, -1, dtype=np.int64)  # flat token -> its index in the concatenated bucket outputs
        base = 0
        for group, made in zip(groups, self._buckets, strict=True):
            for i, row in enumerate(group):
                start = base + i * made.queries
                where[row.first : row.first + row.queries] = np.arange(start, start + row.queries)
            base += made.rows * made.queries
        if (where < 0).any():
            raise ValueError("the rows' queries do not cover every token")
        self._where = torch.from_numpy(where).to(device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads, width = q.shape[1], q.shape[2]
        outputs = []
        for b in self._buckets:
            queries = q.index_select(0, b.query_index).view(b.rows, b.queries, heads, width).transpose(1, 2)
            keys = k.index_select(0, b.key_index).view(b.rows, b.keys, k.shape[1], width).transpose(1, 2)
            values = v.index_select(0, b.key_index).view(b.rows, b.keys, v.shape[1], width).transpose(1, 2)
            grouped = k.shape[1] != heads
            if grouped and q.is_cuda and not b.is_causal:  # CUDA's masked kernels do not support grouped heads
                keys = keys.repeat_interleave(heads // k.shape[1], 1)
                values = values.repeat_interleave(heads // k.shape[1], 1)
                grouped = False
            out = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=b.bias(q.dtype), is_causal=b.is_causal, enable_gqa=grouped
            )
            outputs.append(out.transpose(1, 2).reshape(b.rows * b.queries, heads * width))
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).index_select(0, self._where)
