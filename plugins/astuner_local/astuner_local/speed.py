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
_REPEATS = 5
_WORTH = 1.2
"""How much faster bfloat16 must be to give up 16 bits of every weight for it."""


@lru_cache(maxsize=8)
def product_speed(dtype: torch.dtype, threads: int) -> float:
    """Operations per second of matrix products on the CPU, the best of a few: neighbours only ever take away.

    :param threads: those of torch for the time being; they decide what is measured, so the answer is kept by them.
    """
    x, weight = torch.randn(_ROWS, _WIDTH).to(dtype), torch.randn(_WIDTH, _WIDTH).to(dtype)
    seconds = []
    with torch.inference_mode():
        for _ in range(_REPEATS + 1):  # the first one also makes the kernel
            started = time.perf_counter()
            F.linear(x, weight)
            seconds.append(time.perf_counter() - started)
    return 2 * _ROWS * _WIDTH**2 / min(seconds)


def fastest_dtype() -> torch.dtype:
    """bfloat16 where this processor multiplies it clearly faster than float32, else float32."""
    threads = torch.get_num_threads()
    gain = product_speed(torch.bfloat16, threads) / product_speed(torch.float32, threads)
    return torch.bfloat16 if gain >= _WORTH else torch.float32
