"""Forward pass with cached keys: `prefill` for chunks of prompts, `decode` for one token of many sequences.

Linear layers run over flat tokens without padding; only attention uses rectangles.  Python and dispatch overhead
dominates a tiny model's step, so values shared by all layers (angles, indices, masks) are computed once per call.
Callers hold `torch.inference_mode`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from astuner_local.engine.kv_cache import KVCache
from astuner_local.engine.weights import FusedWeights, LayerWeights
from astuner_local.modeling import rope, rotate


@dataclass(frozen=True)
class Chunk:
    """A chunk of a prompt: `tokens` at positions `start`, `start` + 1 … of `slot`; earlier keys are cached."""

    slot: int
    tokens: Sequence[int]
    start: int
    is_last: bool
    """Whether the prompt ends here, so that its next token can be predicted."""


@dataclass(frozen=True)
class Block:
    """Rows `start` … `end` - 1 of a decode step, which read the first `span` columns of `slots`."""

    start: int
    end: int
    slots: slice | Tensor
    """A slice reads the cache in place; an index tensor [end - start] copies the selected rows."""
    span: int


class Forward:
    """Forward passes with given weights and a table of rotary angles for positions 0 … `positions` - 1."""

    def __init__(self, weights: FusedWeights, positions: int) -> None:
        self.weights = weights
        self._dimensions = weights.dimensions
        with torch.no_grad():
            self._cos, self._sin = rope(weights.model, torch.arange(positions, device=weights.device))
        self._eps = torch.tensor(weights.dimensions.eps, device=weights.device)

    def decode(
        self, cache: KVCache, blocks: Sequence[Block], tokens: Tensor, positions: Tensor, cells: Tensor, mask: Tensor
    ) -> Tensor:
        """Write one token per row into the cache and return its final hidden state [n, hidden], before the norm.

        :param blocks: All rows in order, in blocks that read different lengths of the cache.
        :param tokens: [n] token IDs.
        :param positions: [n] positions.
        :param cells: [n] cells of their keys, in the cache viewed as one list of slot x column cells.
        :param mask: [n, columns] additive attention mask.
        """
        dims, weights = self._dimensions, self.weights
        n = tokens.shape[0]
        shape = (n, dims.kv_heads, dims.heads // dims.kv_heads, dims.head_dim)
        masks = [mask[block.start : block.end, None, None, : block.span] for block in blocks]
        cos, sin = self._angles(positions)
        rows = cache.rows(cells)
        x = F.embedding(tokens, weights.embedding)
        for index, layer in enumerate(weights.layers):
            q, k, v = self._qkv(layer, x, cos, sin)
            cache.write(index, rows, k, v)
            keys, values = cache.keys[index], cache.values[index]
            # The query heads of a group are in the query-length dimension: their keys are read once, not repeated.
            q = q.reshape(shape)
            attended = [
                _attend(
                    q[block.start : block.end],
                    keys[block.slots, :, : block.span],
                    values[block.slots, :, : block.span],
                    masks[i],
                )
                for i, block in enumerate(blocks)
            ]
            x = self._finish(layer, x, (attended[0] if len(attended) == 1 else torch.cat(attended)).reshape(n, -1))
        return x

    def prefill(self, cache: KVCache, chunks: Sequence[Chunk]) -> Tensor:
        """Write all chunks to the cache; return logits [m, vocab] after the m chunks that end their prompt."""
        device = self.weights.device
        lengths = [len(chunk.tokens) for chunk in chunks]
        tokens = torch.tensor([token for chunk in chunks for token in chunk.tokens], device=device)
        positions = torch.cat([torch.arange(c.start, c.start + n) for c, n in zip(chunks, lengths, strict=True)])
        slots = torch.tensor([chunk.slot for chunk in chunks])
        cells = slots.repeat_interleave(torch.tensor(lengths)) * (cache.width + 1) + positions
        positions, cells, slots = positions.to(device), cells.to(device), slots.to(device)
        attend = _CausalAttention(cache, chunks, lengths, slots, positions)
        at = [end - 1 for end, chunk in zip(itertools.accumulate(lengths), chunks, strict=True) if chunk.is_last]
        ends = torch.tensor(at, dtype=torch.long, device=device)

        cos, sin = self._angles(positions)
        rows = cache.rows(cells)
        x = F.embedding(tokens, self.weights.embedding)
        for index, layer in enumerate(self.weights.layers):
            q, k, v = self._qkv(layer, x, cos, sin)
            cache.write(index, rows, k, v)
            attended = attend(index, q, k, v)
            if layer is self.weights.layers[-1]:  # its result is read only at the ends
                x, attended = x.index_select(0, ends), attended.index_select(0, ends)
            x = self._finish(layer, x, attended)
        return self.logits(x)

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self._cos.index_select(0, positions)[:, None], self._sin.index_select(0, positions)[:, None]

    def _qkv(self, layer: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated q [T, H, D], rotated k and plain v [T, KV, D] of the block's input x [T, hidden]."""
        dims = self._dimensions
        h = self._norm(x, layer.input_norm)
        qkv = layer.qkv.of(h).view(-1, dims.heads + 2 * dims.kv_heads, dims.head_dim)
        qk, v = qkv[:, : -dims.kv_heads], qkv[:, -dims.kv_heads :]
        if layer.qk_norm is not None:
            qk = F.rms_norm(qk, (dims.head_dim,), None, dims.eps) * layer.qk_norm
        qk = rotate(qk, cos, sin)
        return qk[:, : dims.heads], qk[:, dims.heads :], v

    def _finish(self, layer: LayerWeights, x: Tensor, attended: Tensor) -> Tensor:
        """Compute the rest of a block after attention."""
        x = layer.o.add_to(x, attended)
        gate, up = layer.gate_up.of(self._norm(x, layer.mlp_norm)).chunk(2, -1)
        return layer.down.add_to(x, F.silu(gate) * up)

    def logits(self, x: Tensor) -> Tensor:
        """Return [m, vocab] for rows of the result of `decode`."""
        return self.weights.head.of(self._norm(x, self.weights.norm))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the RMS norm (Zhang and Sennrich 2019) of x [T, hidden]; in float32 without torch's extra copies."""
        dims = self._dimensions
        if x.dtype is not torch.float32:
            return F.rms_norm(x, (dims.hidden,), weight, dims.eps)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.addcmul(self._eps, length, length, value=1 / dims.hidden).rsqrt_()
        return (x * scale).mul_(weight)


def _attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Return attention of few queries, [n, KV, queries, D] over keys and values [n, KV, span, D].

    On a CPU, two matrix products are faster than torch's own function, which is optimized for many queries.
    """
    if q.is_cuda:
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
    if q.dtype is torch.float32:
        scores = torch.matmul(q, keys.transpose(-1, -2))
    else:  # transpose the few queries instead of the keys: 10 to 50 % faster, same bits
        scores = torch.matmul(keys, q.transpose(-1, -2)).transpose(-1, -2).contiguous()
    shares = torch.add(mask, scores, alpha=q.shape[-1] ** -0.5).softmax(-1, dtype=torch.float32)
    return torch.matmul(shares.to(q.dtype), values)


class _CausalAttention:
    """Attention of ragged chunks; flat queries are padded on the right, where no other query can see them.

    If all chunks start at 0, attention uses the current keys; otherwise it reads cached keys with a mask.
    """

    def __init__(
        self, cache: KVCache, chunks: Sequence[Chunk], lengths: list[int], slots: Tensor, positions: Tensor
    ) -> None:
        self._cache, self._slots = cache, slots
        self._rows, self._longest = len(chunks), max(lengths)
        self._padding: Tensor | None = None
        if min(lengths) < self._longest:
            filled = torch.arange(self._longest) < torch.tensor(lengths)[:, None]
            self._padding = filled.view(-1).nonzero()[:, 0].to(positions.device)
        self._span = max(chunk.start + n for chunk, n in zip(chunks, lengths, strict=True))
        self._mask: Tensor | None = None
        if any(chunk.start for chunk in chunks):
            at = self._pad(positions[:, None])  # padded queries see position 0, so that their softmax is finite
            hidden = torch.arange(self._span, device=positions.device) > at
            self._mask = torch.zeros(hidden.shape, dtype=cache.keys.dtype, device=positions.device)
            self._mask = self._mask.masked_fill_(hidden, -torch.inf)[:, None]

    def __call__(self, index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self._mask is None:
            keys, values = self._pad(k).transpose(1, 2), self._pad(v).transpose(1, 2)
        else:
            keys = self._cache.keys[index, :, :, : self._span].index_select(0, self._slots)
            values = self._cache.values[index, :, :, : self._span].index_select(0, self._slots)
        attended = F.scaled_dot_product_attention(
            self._pad(q).transpose(1, 2),
            keys,
            values,
            attn_mask=self._mask,
            is_causal=self._mask is None,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        flat = attended.transpose(1, 2).reshape(self._rows * self._longest, -1)
        return flat if self._padding is None else flat.index_select(0, self._padding)

    def _pad(self, flat: Tensor) -> Tensor:
        """Reshape [T, ...] to [rows, longest, ...] with padding."""
        if self._padding is not None:
            padded = flat.new_zeros(self._rows * self._longest, *flat.shape[1:])
            flat = padded.index_copy_(0, self._padding, flat)
        return flat.view(self._rows, self._longest, *flat.shape[1:])
