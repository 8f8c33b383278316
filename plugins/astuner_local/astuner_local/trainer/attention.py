"""Causal attention over packed tokens.

A forward pass holds every token once, flat, with no padding.  Attention alone needs sequences side by side, so it
gathers them here: a *row* is a run of consecutive flat tokens (the queries) together with the path of all tokens
they may look at (the keys), which may begin with tokens that belong to other rows.  Rows of similar size share one
padded rectangle (a bucket), so one long row does not pad all others.

Invariant: the result has one vector per flat token, and token t of a path depends on the path's tokens 0 … t only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

_BUCKET_OVERHEAD = 16_384
"""Padded score entries that cost as much as launching one more bucket; measured on the tiny model, not critical."""


@dataclass(frozen=True)
class Row:
    """One run of queries and the keys they may see."""

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
        """Whether the queries are the whole path, so that a plain causal kernel applies and no mask is needed."""
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
    """Gather indices, and a mask where needed, of one padded rectangle of rows."""

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
        """0 where a query may look, -inf elsewhere, [rows, 1, queries, keys]; made once, shared by all layers."""
        if self.is_causal:
            return None
        if self._bias is None or self._bias.dtype != dtype:
            unseen = torch.arange(self.keys, device=self._position.device) > self._position[:, None, :, None]
            self._bias = torch.zeros(unseen.shape, dtype=dtype, device=unseen.device).masked_fill_(unseen, -torch.inf)
        return self._bias


class PackedAttention:
    """``attention(q[T, H, D], k[T, KV, D], v[T, KV, D]) -> [T, H * D]`` for the rows of one forward pass.

    :param rows: their queries cover every flat token exactly once.
    :param tokens: T.
    """

    def __init__(self, rows: Sequence[Row], tokens: int, device: torch.device) -> None:
        groups = bucket(rows)
        self._buckets = [_Bucket(group, device) for group in groups]
        where = np.full(tokens, -1, dtype=np.int64)  # flat token -> its place in the concatenated bucket outputs
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
            if grouped and q.is_cuda and not b.is_causal:  # CUDA's masked kernels know no grouped heads
                keys = keys.repeat_interleave(heads // k.shape[1], 1)
                values = values.repeat_interleave(heads // k.shape[1], 1)
                grouped = False
            out = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=b.bias(q.dtype), is_causal=b.is_causal, enable_gqa=grouped
            )
            outputs.append(out.transpose(1, 2).reshape(b.rows * b.queries, heads * width))
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).index_select(0, self._where)
