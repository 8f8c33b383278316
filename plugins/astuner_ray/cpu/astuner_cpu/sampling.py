"""Drawing a token, with the exact log-probability of the distribution it was drawn from.

The distribution is softmax(logits / temperature), cut to the `top_k` most probable tokens, renormalised, cut to the
smallest set of most probable tokens whose mass reaches `top_p`, renormalised.  Temperature 0 is greedy: the most
probable token, with its log-probability under temperature 1 and without cuts.  All of it in float32.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How one generation draws its tokens, and where it ends."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1 or 0 means no limit."""
    stop: frozenset[int] = frozenset()
    """Tokens that end it and stay in the response."""
    stop_strings: tuple[str, ...] = ()
    """So does the token with which the text comes to hold one of these."""
    seed: int | None = None


def read_sampling(given: Mapping[str, Any], *, eos: Collection[int], default_tokens: int, room: int) -> Sampling:
    """Read parameters by vLLM's names, which VERL's and Trinity's servers take.

    :param eos: the model's own ends, which end a generation unless ``ignore_eos`` is given.
    :param default_tokens: how many tokens where ``max_tokens`` is not given.
    :param room: how many tokens the context has left; never more, whatever is asked for.
    :raises ValueError: a parameter is unknown, or one that is known has a value that would be ignored here.
    """
    rest = dict(given)
    rest.pop("logprobs", None)  # they are always computed
    most = rest.pop("max_tokens", None) or rest.pop("max_new_tokens", None) or default_tokens
    stop = set(rest.pop("stop_token_ids", None) or ())
    strings = rest.pop("stop", None) or ()
    strings = (strings,) if isinstance(strings, str) else tuple(strings)
    if not rest.pop("ignore_eos", False):
        stop |= set(eos)
    if rest.pop("repetition_penalty", 1.0) != 1.0:
        raise ValueError("a rollout server on a CPU has no repetition_penalty; leave it at 1.0")
    names = {"temperature": float, "top_p": float, "top_k": int, "seed": int}
    read = {name: kind(rest.pop(name)) for name, kind in names.items() if rest.get(name) is not None}
    if unknown := sorted(set(rest) - set(names)):
        raise ValueError(f"a rollout server on a CPU does not know the sampling parameter {unknown[0]!r}")
    return Sampling(max_tokens=max(1, min(int(most), room)), stop=frozenset(stop), stop_strings=strings, **read)


def log_distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """Log-probabilities [V] of the distribution that a token is drawn from, -inf where it is cut."""
    if sampling.temperature <= 0:
        return torch.log_softmax(logits.float(), -1)
    logprobs = torch.log_softmax(logits.float() / sampling.temperature, -1)
    if sampling.top_k <= 0 and sampling.top_p >= 1:
        return logprobs
    ordered, order = logprobs.sort(descending=True, stable=True)
    if sampling.top_k > 0:
        ordered[sampling.top_k :] = -torch.inf
        ordered = ordered.log_softmax(-1)
    if sampling.top_p < 1:
        mass = ordered.exp()
        outside = mass.cumsum(-1) - mass >= sampling.top_p
        outside[0] = False  # the most probable token stays, whatever top_p is
        ordered = ordered.masked_fill(outside, -torch.inf).log_softmax(-1)
    return torch.full_like(logprobs, -torch.inf).scatter(-1, order, ordered)


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> tuple[int, float]:
    """One token from logits [V], and its log-probability."""
    logprobs = log_distribution(logits, sampling)
    if sampling.temperature <= 0:
        token = int(logprobs.argmax())
    else:
        token = int(torch.multinomial(logprobs.exp(), 1, generator=generator))
    return token, float(logprobs[token])
