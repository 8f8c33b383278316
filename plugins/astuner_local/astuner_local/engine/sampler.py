"""Drawing one token per row, with the exact log-probability of the distribution it was drawn from.

The distribution is softmax(logits / temperature), cut to the `top_k` most probable tokens, renormalised, cut to the
smallest set of most probable tokens whose mass reaches `top_p` (Holtzman et al. 2020), renormalised.
Temperature 0 is greedy: the most probable token, with its log-probability under temperature 1 and without cuts, since
the distribution in the limit says nothing (every log-probability would be 0).

Everything is in float32, and one uniform number per row decides (inverse transform sampling), so a row whose numbers
come from its own seeded generator draws the same tokens whatever else is in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

UNIFORM_MAX = 1 - 2**-22
"""Uniform numbers lie in [0, this): times a total mass they stay below it in float32, so that the drawn token always
has a probability above 0."""


@dataclass(frozen=True, kw_only=True)
class SamplingRows:
    """Sampling parameters of a batch, one entry per row; None where all rows have the default."""

    temperature: Tensor | None = None
    """[n, 1] float; 1 for greedy rows."""
    greedy: Tensor | None = None
    """[n] bool."""
    top_k: Tensor | None = None
    """[n, 1] long; the vocabulary's size for rows without limit."""
    top_p: Tensor | None = None
    """[n, 1] float."""


def sample(logits: Tensor, uniform: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
    """Draw from logits [n, V] with uniform [n, 1] in [0, `UNIFORM_MAX`); returns tokens [n] and log-probs [n]."""
    logits = logits.float()
    if rows.temperature is not None:
        logits = logits / rows.temperature
    logprobs = torch.log_softmax(logits, -1)
    drawn_from = logprobs
    if rows.top_k is not None or rows.top_p is not None:
        drawn_from = _cut(logprobs, rows.top_k, rows.top_p)
    mass = drawn_from.exp().cumsum_(-1)
    # The first index whose cumulated mass exceeds the number: its own mass is above 0.
    tokens = torch.searchsorted(mass, uniform * mass[:, -1:], right=True)
    chosen = drawn_from.gather(-1, tokens)
    if rows.greedy is not None:
        best = logits.argmax(-1, keepdim=True)
        greedy = rows.greedy[:, None]
        tokens = torch.where(greedy, best, tokens)
        chosen = torch.where(greedy, logprobs.gather(-1, best), chosen)
    return tokens[:, 0], chosen[:, 0]


def _cut(logprobs: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Log-probabilities [n, V] renormalised over the kept tokens, -inf elsewhere; ties go to the smaller index."""
    ordered, order = logprobs.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        rank = torch.arange(logprobs.shape[-1], device=logprobs.device)
        ordered = ordered.masked_fill(rank >= top_k, -torch.inf).log_softmax(-1)
    if top_p is not None:
        before = ordered.exp().cumsum(-1) - ordered.exp()
        outside = before >= top_p
        outside[:, 0] = False  # the most probable token is always kept
        # a row at top_p = 1 keeps everything, also where rounding makes the mass before a token reach 1
        ordered = ordered.masked_fill(outside & (top_p < 1), -torch.inf).log_softmax(-1)
    return torch.full_like(logprobs, -torch.inf).scatter(-1, order, ordered)
