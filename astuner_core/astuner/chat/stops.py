"""Stop strings: where the caller's words end an answer.

The engine knows end tokens only.  A prefix of a sampled answer is itself a sample, so cutting the tokens behind the
first one with which the text holds a stop string is exactly what stopping there would have given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from astuner.contracts.types import FinishReason, Generation


def cut_at_stop(
    generation: Generation, stops: Sequence[str], decode: Callable[[Sequence[int]], str]
) -> tuple[Generation, str | None]:
    """The generation up to the first of ``stops``, and which of them that was (None: none, and nothing is cut).

    :param decode: the text of token ids.
    """
    ids = generation.response_ids
    if not stops or not ids:
        return generation, None
    if not any(stop in decode(ids) for stop in stops):
        return generation, None
    low, high = 1, len(ids)  # the fewest tokens whose text holds a stop string: the more tokens, the more they hold
    while low < high:
        middle = (low + high) // 2
        if any(stop in decode(ids[:middle]) for stop in stops):
            high = middle
        else:
            low = middle + 1
    text = decode(ids[:low])
    first = min((stop for stop in stops if stop in text), key=text.index)
    cut = replace(
        generation,
        response_ids=ids[:low],
        logprobs=generation.logprobs[:low],
        finish_reason=FinishReason.STOP,
    )
    return cut, first
