"""Keys and values of all slots, one block per layer: [slots, kv_heads, width + 1, head_dim].

A slot is a row and holds one sequence from position 0; each head's keys are contiguous, as matrix products read them.
The rectangle slots x width grows with the admitted requests and is bounded by ``token_budget`` = slots x width: long
sequences leave fewer slots.  Column ``width`` is scratch space: idle rows inside a decoded range write there, and it is
never read.

Invariant: all readable values are finite.  New memory is zeroed, because a masked position is multiplied by 0, and
0 x NaN would spread.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from astuner_local.modeling import Dimensions

_WIDTH_STEP = 64
"""Widths are multiples of this, so that a few more tokens do not move the cache."""


_MEMORY_SHARE = 0.25
"""Most memory of the cache as a share of free memory on a GPU, or physical memory on a CPU."""


def bytes_per_token(dims: Dimensions, dtype: torch.dtype) -> int:
    """Return the bytes of the keys and values of one token."""
    return 2 * dims.layers * dims.kv_heads * dims.head_dim * dtype.itemsize


def default_token_budget(bytes_per_token: int, device: torch.device) -> int:
    """Return the tokens that fit into the cache's share of memory. Memory is allocated only when requests need it."""
    if device.type == "cuda":
        memory, _ = torch.cuda.mem_get_info(device)
    elif hasattr(os, "sysconf"):
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:  # Windows
        memory = 8 * 2**30
    return int(memory * _MEMORY_SHARE) // bytes_per_token


class KVCache:
    """Storage of keys and values; the scheduler knows which tokens a slot holds."""

    def __init__(
        self, dims: Dimensions, *, dtype: torch.dtype, device: torch.device, max_slots: int, token_budget: int
    ) -> None:
        self._layers, self._heads, self._head_dim = dims.layers, dims.kv_heads, dims.head_dim
        self._dtype, self._device = dtype, device
        self.max_slots, self.token_budget = max_slots, token_budget
        self.slots = 0
        self.width = 0
        self.keys = self._allocate(0, 0)
        self.values = self._allocate(0, 0)

    def width_for(self, tokens: int) -> int:
        """Return the width for a sequence of this many tokens."""
        return min(-(-tokens // _WIDTH_STEP) * _WIDTH_STEP, max(self.token_budget, tokens))

    def slots_at(self, width: int) -> int:
        """Return how many slots the budget allows at this width."""
        return min(self.max_slots, self.token_budget // width)

    def resize(self, slots: int, width: int) -> None:
        """Change the rectangle; the intersection of old and new is kept."""
        if (slots, width) == (self.slots, self.width):
            return
        kept_slots, kept_width = min(slots, self.slots), min(width, self.width)
        for name in ("keys", "values"):  # one at a time: at most one of them exists twice
            old, new = getattr(self, name), self._allocate(slots, width)
            new[:, :kept_slots, :, :kept_width] = old[:, :kept_slots, :, :kept_width]
            setattr(self, name, new)
        self.slots, self.width = slots, width

    def copy_prefix(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` positions of one slot into another, in all layers."""
        for cache in (self.keys, self.values):
            cache[:, target, :, :tokens] = cache[:, source, :, :tokens]

    def rows(self, cells: Tensor) -> Tensor:
        """Return [T x heads] row indices for the keys of T tokens in a layer viewed as rows [head_dim]; for `write`.

        :param cells: [T] cell indices in slots x (width + 1).
        """
        columns = self.width + 1
        first = cells // columns * (self._heads * columns) + cells % columns
        return (first[:, None] + torch.arange(self._heads, device=self._device) * columns).view(-1)

    def write(self, layer: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [T, heads, head_dim] of tokens in their `rows`."""
        for cache, new in ((self.keys, keys), (self.values, values)):
            cache[layer].view(-1, self._head_dim).index_copy_(0, rows, new.reshape(-1, self._head_dim))

    def _allocate(self, slots: int, width: int) -> Tensor:
        shape = self._layers, slots, self._heads, width + 1, self._head_dim
        return torch.zeros(shape, dtype=self._dtype, device=self._device)
