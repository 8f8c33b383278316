"""The sequences that are being decoded, as tensors: one step adds one token to each of them.

Row i belongs to slot i of the cache.  Per-cell tensors have the cache's own layout, [slots, width + 1] with a scratch
column at the end, so that one index serves keys, mask, random numbers and results.  Values that depend only on the set
of running rows are computed when that set changes, not at every step.

Invariant: a running row's `_position` is the cell whose token (`_current`) has no keys in the cache yet; an idle row's
`_position` is the scratch column.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from astuner.contracts.errors import ModelFailed
from astuner.contracts.types import SamplingParams
from astuner_local.engine.forward import Block, Forward
from astuner_local.engine.kv_cache import KVCache

_NO_TOKEN = -1
_PIECE = 8
_WORTH_SPLITTING = 16_384
"""Columns read per layer (rows x longest) below which a second attention call costs more than it saves."""


UNIFORM_MAX = 1 - 2**-22
"""Uniform numbers are in [0, this): multiplied by a total mass they stay below it in float32, so that the drawn token
always has a probability above 0."""


@dataclass(frozen=True, kw_only=True)
class SamplingRows:
    """Sampling parameters of a batch, one entry per row; None if all rows have the default."""

    temperature: Tensor | None = None
    """[n, 1] float; 1 for greedy rows."""
    greedy: Tensor | None = None
    """[n] bool."""
    top_k: Tensor | None = None
    """[n, 1] long; the vocabulary size for rows without a limit."""
    top_p: Tensor | None = None
    """[n, 1] float."""


def sample(logits: Tensor, uniform: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
    """Sample from logits [n, V] with uniform [n, 1] in [0, `UNIFORM_MAX`); return tokens [n] and log-probs [n].

    The distribution is softmax(logits / temperature), cut to the `top_k` most probable tokens, renormalized, cut to the
    smallest set of most probable tokens whose mass reaches `top_p` (Holtzman et al. 2020), renormalized.
    Temperature 0 is greedy: the most probable token with its log-probability at temperature 1 without cuts, because
    in the limit distribution every log-probability would be 0.

    Everything is in float32, and one uniform number per row decides (inverse transform sampling), so a row with its own
    seeded generator draws the same tokens regardless of the rest of the batch.
    """
    logits = logits.float()
    if rows.temperature is not None:
        logits = logits / rows.temperature
    logprobs = torch.log_softmax(logits, -1)
    drawn_from = logprobs
    if rows.top_k is not None or rows.top_p is not None:
        drawn_from = _cut(logprobs, rows.top_k, rows.top_p)
    mass = drawn_from.exp().cumsum_(-1)
    # The first index whose cumulative mass exceeds the number: its own mass is above 0.
    tokens = torch.searchsorted(mass, uniform * mass[:, -1:], right=True)
    chosen = drawn_from.gather(-1, tokens)
    if rows.greedy is not None:
        best = logits.argmax(-1, keepdim=True)
        greedy = rows.greedy[:, None]
        tokens = torch.where(greedy, best, tokens)
        chosen = torch.where(greedy, logprobs.gather(-1, best), chosen)
    return tokens[:, 0], chosen[:, 0]


def _cut(logprobs: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Return log-probabilities [n, V], renormalized over kept tokens, -inf elsewhere; ties keep the smaller index."""
    ordered, order = logprobs.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        rank = torch.arange(logprobs.shape[-1], device=logprobs.device)
        ordered = ordered.masked_fill(rank >= top_k, -torch.inf).log_softmax(-1)
    if top_p is not None:
        before = ordered.exp().cumsum(-1) - ordered.exp()
        outside = before >= top_p
        outside[:, 0] = False  # the most probable token is always kept
        # a row with top_p = 1 keeps everything, even if rounding makes the mass before a token reach 1
        ordered = ordered.masked_fill(outside & (top_p < 1), -torch.inf).log_softmax(-1)
    return torch.full_like(logprobs, -torch.inf).scatter(-1, order, ordered)


@dataclass(frozen=True)
class _Running:
    """Data that a step needs about the set of running rows."""

    slots: slice | Tensor
    """Rows to compute: a range if most rows in it run, else the running rows themselves."""
    rows: Tensor
    """[m] running rows."""
    row_starts: Tensor
    """[m] first cell of each running row."""
    read_starts: Tensor
    """[n] first cell of each row in `slots`."""
    kept: Tensor | None
    """[m] indices of the running rows in `slots`; None if `slots` has no other rows."""
    sampling: SamplingRows
    stop_ids: Tensor
    """[m or 1, ids]"""
    last: Tensor
    """[m] last column that each row may fill."""


def _pieces(lengths: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (start, end, longest) of runs of rows that are read together.

    A single piece reads every row up to the longest, which is fastest for small or even batches; pieces of a few rows
    pay off when most of that would be empty.
    """
    pieces = [
        (start, min(start + _PIECE, len(lengths)), max(lengths[start : start + _PIECE]))
        for start in range(0, len(lengths), _PIECE)
    ]
    whole = len(lengths) * max(lengths)
    if whole < _WORTH_SPLITTING or sum((end - start) * longest for start, end, longest in pieces) > whole * 2 / 3:
        return [(0, len(lengths), max(lengths))]
    return pieces


class DecodeBatch:
    """Starts, advances and stops rows. Every method runs under `torch.inference_mode`."""

    def __init__(self, forward: Forward, cache: KVCache, *, seed: int) -> None:
        self._forward, self._cache = forward, cache
        self._device = forward.weights.device
        self._vocab = forward.weights.dimensions.vocab
        self._dtype = forward.weights.dtype
        self._generator = torch.Generator().manual_seed(seed)
        self._rows: list[int] = []
        self._running: _Running | None = None
        self._pieces: list[tuple[int, int, int]] = []
        self._steps = 0  # since the pieces were made; each step makes every row one token longer
        self._params: list[SamplingParams] = []
        self._stop_ids: list[tuple[int, ...]] = []
        self._starting: list[tuple[int, int, int, int]] = []
        """Rows whose tensors are not written yet: slot, last token, length and limit."""
        self._drawn: list[Tensor] = []
        """Their uniform numbers, [limit - length] each."""
        self._allocate()

    def __len__(self) -> int:
        return len(self._rows)

    def _allocate(self) -> None:
        slots, columns, device = self._cache.slots, self._cache.width + 1, self._device
        self._current = torch.zeros(slots, dtype=torch.long, device=device)
        self._position = torch.full((slots,), self._cache.width, device=device)
        self._last = torch.zeros(slots, dtype=torch.long, device=device)
        self._mask = torch.full((slots, columns), -torch.inf, dtype=self._dtype, device=device)
        self._mask[:, 0] = 0  # every sequence has a first token, and an idle row's softmax stays finite
        self._uniform = torch.zeros(slots, columns, device=device)
        self._tokens = torch.zeros(slots, columns, dtype=torch.long, device=device)
        self._logprobs = torch.zeros(slots, columns, device=device)

    def follow_cache(self) -> None:
        """Adopt the cache's new shape; running rows continue."""
        self._write_starts()
        old = (self._current, self._position, self._last, self._mask, self._uniform, self._tokens, self._logprobs)
        self._allocate()
        rows = torch.tensor(self._rows, dtype=torch.long, device=self._device)
        columns = min(old[3].shape[1], self._mask.shape[1]) - 1  # without the scratch column
        for new, before in zip((self._current, self._position, self._last), old[:3], strict=True):
            new[rows] = before[rows]
        for new, before in zip((self._mask, self._uniform, self._tokens, self._logprobs), old[3:], strict=True):
            new[rows, :columns] = before[rows, :columns]
        spare = self._cache.slots - len(self._params)
        self._params = self._params[: self._cache.slots] + [SamplingParams(max_tokens=1)] * spare
        self._stop_ids = self._stop_ids[: self._cache.slots] + [()] * spare
        self._running = None

    def start(
        self, slot: int, prompt: Sequence[int], limit: int, sampling: SamplingParams, stop_ids: frozenset[int]
    ) -> None:
        """Start decoding after `prompt`; all its tokens except the last have their keys in `slot`.

        :param limit: Most tokens of prompt and response together.
        """
        generator = self._generator if sampling.seed is None else torch.Generator().manual_seed(sampling.seed)
        self._drawn.append(torch.rand(limit - len(prompt), generator=generator))
        self._starting.append((slot, prompt[-1], len(prompt), limit))
        self._params[slot], self._stop_ids[slot] = sampling, tuple(stop_ids)
        self._rows.append(slot)
        self._running = None

    def _write_starts(self) -> None:
        """Write the rows of `start` together, because a tensor operation takes as long for one row as for many."""
        if not self._starting:
            return
        device = self._device
        rows, current, lengths, limits = torch.tensor(self._starting, device=device).unbind(1)
        self._current.index_copy_(0, rows, current)
        self._position.index_copy_(0, rows, lengths - 1)
        self._last.index_copy_(0, rows, limits - 1)
        hidden = torch.arange(self._mask.shape[1], device=device) >= lengths[:, None]
        self._mask.index_copy_(0, rows, torch.zeros_like(hidden, dtype=self._dtype).masked_fill_(hidden, -torch.inf))
        cells = self._cells([(slot, length, limit) for slot, _, length, limit in self._starting])
        self._uniform.view(-1).index_copy_(0, cells, torch.cat(self._drawn).mul_(UNIFORM_MAX).to(device))
        self._starting, self._drawn = [], []

    def _cells(self, spans: Sequence[tuple[int, int, int]]) -> Tensor:
        """Return the cells of columns `start` … `end` - 1, for (slot, start, end) of each slot."""
        width = self._mask.shape[1]
        cells = itertools.chain.from_iterable(range(s * width + start, s * width + end) for s, start, end in spans)
        return torch.tensor(list(cells), dtype=torch.long, device=self._device)

    def stop(self, slots: Collection[int]) -> None:
        """Make rows idle; their tokens stay readable until the next `start`."""
        self._write_starts()
        self._rows = [row for row in self._rows if row not in slots]
        rows = torch.tensor(list(slots), dtype=torch.long, device=self._device)
        self._current.index_fill_(0, rows, 0)
        self._position.index_fill_(0, rows, self._cache.width)
        self._running = None

    def end(self, slot: int) -> int:
        """Return the column after the running row's last token."""
        self._write_starts()
        return int(self._position[slot]) + 1

    def read(self, spans: Sequence[tuple[int, int, int]]) -> list[tuple[list[int], list[float]]]:
        """Return tokens and log-probs in columns `start` … `end` - 1, for (slot, start, end) of each slot."""
        cells = self._cells(spans)
        tokens: list[int] = self._tokens.view(-1).index_select(0, cells).tolist()
        logprobs: list[float] = self._logprobs.view(-1).index_select(0, cells).tolist()
        ends = list(itertools.accumulate(end - start for _, start, end in spans))
        return [(tokens[a:b], logprobs[a:b]) for a, b in zip([0, *ends], ends, strict=False)]

    def step(self) -> list[tuple[int, int]]:
        """Decode one token for every running row; returns the same as `advance`."""
        running = self._running or self._prepare()
        slots = running.slots
        positions = self._position[slots]
        cells = running.read_starts + positions
        self._mask.view(-1).index_fill_(0, cells, 0)
        blocks = [
            Block(start, end, _part(slots, start, end), longest + self._steps) for start, end, longest in self._pieces
        ]
        hidden = self._forward.decode(self._cache, blocks, self._current[slots], positions, cells, self._mask[slots])
        self._steps += 1
        kept = hidden if running.kept is None else hidden.index_select(0, running.kept)
        return self._advance(running, self._forward.logits(kept))

    def advance(self, slots: Sequence[int], logits: Tensor) -> list[tuple[int, int]]:
        """Draw the next token of some running rows, which `step` did not decode, from logits [len(slots), vocab].

        Returns (slot, end) of each finished row: its last token is in column `end` - 1.
        """
        return self._advance(self._describe(slots, gather=True), logits)

    def _advance(self, rows: _Running, logits: Tensor) -> list[tuple[int, int]]:
        columns = self._position.index_select(0, rows.rows) + 1
        cells = rows.row_starts + columns
        uniform = self._uniform.view(-1).index_select(0, cells)
        try:
            tokens, logprobs = sample(logits, uniform[:, None], rows.sampling)
        except (IndexError, RuntimeError) as e:  # NaN cannot be sampled from
            if logits.isfinite().all():
                raise
            raise ModelFailed(
                "the model's logits are not finite (NaN or infinite), because its weights are damaged or exceed the "
                "range of their dtype. Use an earlier checkpoint, or set astuner.model.dtype: float32"
            ) from e
        self._tokens.view(-1).index_copy_(0, cells, tokens)
        self._logprobs.view(-1).index_copy_(0, cells, logprobs)
        self._current.index_copy_(0, rows.rows, tokens)
        self._position.index_copy_(0, rows.rows, columns)
        done = (tokens[:, None] == rows.stop_ids).any(1).logical_or_(columns >= rows.last).nonzero()[:, 0]
        if not len(done):
            return []
        slots, ends = rows.rows[done].tolist(), (columns[done] + 1).tolist()
        return list(zip(slots, ends, strict=True))

    def _prepare(self) -> _Running:
        self._rows.sort()
        low, high = self._rows[0], self._rows[-1] + 1
        running = self._describe(self._rows, gather=2 * len(self._rows) < high - low)
        positions = self._position[running.slots].tolist()
        width = self._cache.width
        self._pieces = _pieces([1 if position == width else position + 1 for position in positions])
        self._steps = 0
        self._running = running
        return running

    def _describe(self, slots: Sequence[int], *, gather: bool) -> _Running:
        self._write_starts()
        device, columns = self._device, self._cache.width + 1
        rows = torch.tensor(slots, device=device)
        low, high = slots[0], slots[-1] + 1
        everything = gather or high - low == len(slots)
        stop_ids = [self._stop_ids[slot] for slot in slots]
        if len(set(stop_ids)) == 1:
            stop_ids = stop_ids[:1]
        longest = max(1, *map(len, stop_ids))
        return _Running(
            slots=rows if gather else slice(low, high),
            rows=rows,
            row_starts=rows * columns,
            read_starts=(rows if gather else torch.arange(low, high, device=device)) * columns,
            kept=None if everything else rows - low,
            sampling=self._sampling([self._params[slot] for slot in slots]),
            stop_ids=torch.tensor([[*ids, *[_NO_TOKEN] * (longest - len(ids))] for ids in stop_ids], device=device),
            last=self._last.index_select(0, rows),
        )

    def _sampling(self, params: Sequence[SamplingParams]) -> SamplingRows:
        device, vocab = self._device, self._vocab
        drawn = [p for p in params if p.temperature > 0]
        temperature = greedy = top_k = top_p = None
        if any(p.temperature != 1 for p in drawn):
            temperature = torch.tensor([[p.temperature or 1.0] for p in params], device=device)
        if len(drawn) < len(params):
            greedy = torch.tensor([p.temperature == 0 for p in params], device=device)
        if any(0 < p.top_k < vocab for p in drawn):
            top_k = torch.tensor([[p.top_k if p.top_k > 0 else vocab] for p in params], device=device)
        if any(p.top_p < 1 for p in drawn):
            top_p = torch.tensor([[p.top_p] for p in params], device=device)
        return SamplingRows(temperature=temperature, greedy=greedy, top_k=top_k, top_p=top_p)


def _part(slots: slice | Tensor, start: int, end: int) -> slice | Tensor:
    if isinstance(slots, slice):
        return slice(slots.start + start, slots.start + end)
    return slots[start:end]
