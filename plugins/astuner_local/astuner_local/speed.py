"""Measure how fast this machine's processor multiplies matrices, on demand and once per process.

A processor's name or flags do not show whether bfloat16 is faster than float32: some processors multiply it twice as
fast, some at half the speed with the same instructions, and some only emulate it.
"""

from __future__ import annotations

import time
from functools import lru_cache

import torch
import torch.nn.functional as F

_ROWS, _WIDTH = 256, 1024
"""Size of a product that is bound by arithmetic: half a billion operations, some milliseconds."""
_REPEATS = 8
_WORTH = 1.2
"""Least speedup of bfloat16 for which its lower precision is accepted."""


@lru_cache(maxsize=4)
def product_speed(dtype: torch.dtype) -> float:
    """Return the operations per second of matrix products on one core, the best of several runs.

    Measures the CPU time of one thread, so that other load on the machine does not change the result.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        x, weight = torch.ones(_ROWS, _WIDTH, dtype=dtype), torch.ones(_WIDTH, _WIDTH, dtype=dtype)
        seconds = []
        with torch.inference_mode():
            for _ in range(_REPEATS + 1):  # the first run also creates the kernel
                started = time.thread_time()
                F.linear(x, weight)
                seconds.append(time.thread_time() - started)
    finally:
        torch.set_num_threads(threads)
    return 2 * _ROWS * _WIDTH**2 / min(seconds)


def fastest_dtype() -> torch.dtype:
    """Return bfloat16 if this processor multiplies it clearly faster than float32, else float32."""
    gain = product_speed(torch.bfloat16) / product_speed(torch.float32)
    return torch.bfloat16 if gain >= _WORTH else torch.float32
