"""Continuous batching around a transformers model: requests join and leave between steps.

The rows of a batch end in the same column and are padded on the left; a mask hides the padding and every row has
positions of its own, so what a row computes is what it would compute alone (up to the order of float additions).
Nothing here knows about threads: one call at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from astuner_cpu.sampling import Sampling, draw


@dataclass(eq=False)
class Request:
    """One prompt, and what has been generated for it so far."""

    prompt: list[int]
    sampling: Sampling
    generator: torch.Generator
    decode: Callable[[list[int]], str] | None = None
    """The text of tokens, for stop strings."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        """Prompt and response so far."""
        return [*self.prompt, *self.tokens]

    @property
    def finished(self) -> bool:
        return bool(self.tokens) and (self.stopped or len(self.tokens) >= self.sampling.max_tokens)

    @property
    def stopped(self) -> bool:
        """Whether its last token is an end, or completes a stop string."""
        if self.tokens[-1] in self.sampling.stop or self.decode is None or not self.sampling.stop_strings:
            return self.tokens[-1] in self.sampling.stop
        text = self.decode(self.tokens)
        return any(string in text for string in self.sampling.stop_strings)

    def take(self, logits: Tensor) -> None:
        """Draw the next token from logits [V]."""
        token, logprob = draw(logits, self.sampling, self.generator)
        self.tokens.append(token)
        self.logprobs.append(logprob)


class Decoder:
    """The batch that is being decoded, and the requests that wait to join it."""

    def __init__(self, model: PreTrainedModel, *, max_rows: int, max_prefill_tokens: int) -> None:
        """
        :param max_rows: most requests decoded at once; the others wait.
        :param max_prefill_tokens: most tokens of those that join, with their padding, in one forward pass; a longer
            request has one of its own.
        """
        self.model = model
        self.max_rows = max_rows
        self.max_prefill_tokens = max_prefill_tokens
        self._waiting: deque[Request] = deque()
        self._rows: list[Request] = []
        self._keys_values: list[tuple[Tensor, Tensor]] = []
        """Per layer, each [rows, heads, columns, size]."""
        self._padding = torch.zeros(0, dtype=torch.long)
        """How many columns of each row are padding."""

    def add(self, request: Request) -> None:
        """Let it join at the next step; may be called while a step runs in another thread."""
        self._waiting.append(request)

    def drop(self, request: Request) -> None:
        """Forget it, finished or not."""
        if request in self._waiting:
            self._waiting.remove(request)
        elif request in self._rows:
            self._keep([row is not request for row in self._rows])

    def recompute(self) -> None:
        """Compute everything in the batch anew at the next step: what it holds came from other weights."""
        self._waiting.extendleft(reversed(self._rows))
        self._rows, self._keys_values, self._padding = [], [], torch.zeros(0, dtype=torch.long)

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Give every request of the batch one token; returns those that are finished now, which leave it."""
        if self._rows:
            width = self._width
            last = torch.tensor([[row.tokens[-1]] for row in self._rows])
            self._forward(self._rows, last, self._padding, width - self._padding[:, None], self._keys_values)
        joining = self._joining()
        if joining:
            self._join(joining)
        finished = [row for row in self._rows if row.finished]
        if finished:
            self._keep([not row.finished for row in self._rows])
        return finished

    @property
    def _width(self) -> int:
        return self._keys_values[0][0].shape[2] if self._rows else 0

    def _joining(self) -> list[Request]:
        """The waiting requests that fit into the batch and into one forward pass, first come first served."""
        joining: list[Request] = []
        longest = 0
        while self._waiting and len(self._rows) + len(joining) < self.max_rows:
            longest = max(longest, len(self._waiting[0].ids))
            if joining and longest * (len(joining) + 1) > self.max_prefill_tokens:
                break
            joining.append(self._waiting.popleft())
        return joining

    def _join(self, joining: list[Request]) -> None:
        """Compute what they have, draw one more token for each, and put them below the rows that are there."""
        have = [request.ids for request in joining]
        width = max(map(len, have))
        padding = torch.tensor([width - len(ids) for ids in have])
        ids = torch.tensor([[0] * (width - len(ids)) + ids for ids in have])
        positions = (torch.arange(width) - padding[:, None]).clamp(min=0)
        new: list[tuple[Tensor, Tensor]] = []
        self._forward(joining, ids, padding, positions, new)
        if self._rows:
            both = max(self._width, width)
            old, new = _widen(self._keys_values, both), _widen(new, both)
            padding = torch.cat([self._padding + both - self._width, padding + both - width])
            new = [(torch.cat([k, n]), torch.cat([v, m])) for (k, v), (n, m) in zip(old, new, strict=True)]
        self._keys_values, self._padding = new, padding
        self._rows = [*self._rows, *joining]

    def _forward(
        self, rows: list[Request], ids: Tensor, padding: Tensor, positions: Tensor, keys_values: list[Any]
    ) -> None:
        """One forward pass over the new columns ``ids`` and one token for each row; replaces ``keys_values``."""
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(keys_values):
            cache.update(keys, values, layer)
        columns = cache.get_seq_length() + ids.shape[1]
        output = self.model(
            input_ids=ids,
            attention_mask=(torch.arange(columns) >= padding[:, None]).long(),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        layers: list[Any] = cache.layers
        keys_values[:] = [(layer.keys, layer.values) for layer in layers]
        for row, logits in zip(rows, output.logits[:, -1], strict=True):
            row.take(logits)

    def _keep(self, which: list[bool]) -> None:
        """Keep some rows, and no column that is padding in all of them."""
        kept = torch.tensor(which, dtype=torch.bool)
        self._rows = [row for row, keep in zip(self._rows, which, strict=True) if keep]
        self._padding = self._padding[kept]
        spare = int(self._padding.min()) if self._rows else 0
        self._padding = self._padding - spare
        self._keys_values = [(k[kept][:, :, spare:], v[kept][:, :, spare:]) for k, v in self._keys_values]


def _widen(keys_values: list[tuple[Tensor, Tensor]], width: int) -> list[tuple[Tensor, Tensor]]:
    """The same rows, padded on the left to ``width`` columns."""

    def pad(tensor: Tensor) -> Tensor:
        return torch.nn.functional.pad(tensor, (0, 0, width - tensor.shape[2], 0))

    return [(pad(keys), pad(values)) for keys, values in keys_values]
