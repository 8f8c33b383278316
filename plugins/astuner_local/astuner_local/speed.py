"""How fast this machine's processor multiplies matrices, measured where it matters and once a process.

Whether bfloat16 is faster than float32 cannot be told from a processor's name or flags: some multiply it twice as fast,
some with the same instructions half as fast, and some not at all, so that it is emulated.
"""

from __future__ import annotations

import time
from functools import lru_cache

import torch
import torch.nn.functional as F

_ROWS, _WIDTH = 256, 1024
"""A product large enough to be bound by arithmetic: half a billion operations, some milliseconds."""
_REPEATS = 8
_WORTH = 1.2
"""How much faster bfloat16 must be to give up 16 bits of every weight for it."""


@lru_cache(maxsize=4)
def product_speed(dtype: torch.dtype) -> float:
    """Operations per second of matrix products on one core, the best of a few.

    One thread and its own CPU time, since what others do on the machine must not decide: under their load the clock
    said at one time that the slower type was the faster one.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        x, weight = torch.ones(_ROWS, _WIDTH, dtype=dtype), torch.ones(_WIDTH, _WIDTH, dtype=dtype)
        seconds = []
        with torch.inference_mode():
            for _ in range(_REPEATS + 1):  # the first one also makes the kernel
                started = time.thread_time()
                F.linear(x, weight)
                seconds.append(time.thread_time() - started)
    finally:
        torch.set_num_threads(threads)
    return 2 * _ROWS * _WIDTH**2 / min(seconds)


def fastest_dtype() -> torch.dtype:
    """bfloat16 where this processor multiplies it clearly faster than float32, else float32."""
    gain = product_speed(torch.bfloat16) / product_speed(torch.float32)
    return torch.bfloat16 if gain >= _WORTH else torch.float32
