"""Stop strings: where the caller's words end an answer.

An engine that is given them (`SamplingParams.stop`) ends there by itself, as far as it can; what it leaves is cut here.
A prefix of a sampled answer is itself a sample, so cutting the tokens behind the first one with which the text holds a
stop string is exactly what stopping there would have given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from astuner.contracts.types import FinishReason, Generation

_ROOM = 4
"""Tokens of a stop string that may have no bytes of their own."""


def comes_to_stop(ids: Sequence[int], stops: Sequence[str], decode: Callable[[Sequence[int]], str]) -> bool:
    """Whether the last of ``ids`` completes one of ``stops``; asked after each token, it reads the end alone.

    :param stops: none of them empty.
    :param decode: the text of token ids.
    """
    longest = max(len(stop.encode()) for stop in stops) + _ROOM
    end = decode(ids[-longest:])
    if not any(stop in end for stop in stops):
        return False
    whole = decode(ids)  # the end alone may decode to something else
    return any(stop in whole for stop in stops)


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
