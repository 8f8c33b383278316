"""Ask user code the way an episode does: a coroutine on the loop, a plain function in a thread."""

from __future__ import annotations

import asyncio
import inspect
import math
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

LONGEST_BLOCK = 2.0
"""Seconds; far above what a busy machine adds, far below what a person forgives."""


async def ask(function: Callable[..., Any], *arguments: Any) -> Any:
    if inspect.iscoroutinefunction(function):
        return await function(*arguments)
    answer = await asyncio.to_thread(function, *arguments)
    return await answer if inspect.isawaitable(answer) else answer


def run(work: Coroutine[Any, Any, T]) -> tuple[T, float]:
    """The result, and the longest time in seconds for which nothing else could run on the loop."""
    return asyncio.run(_watched(work))


async def _watched(work: Coroutine[Any, Any, T]) -> tuple[T, float]:
    longest = 0.0

    async def heartbeat() -> None:
        nonlocal longest
        while True:
            before = time.monotonic()
            try:
                await asyncio.sleep(0.02)
            finally:
                longest = max(longest, time.monotonic() - before - 0.02)

    watcher = asyncio.create_task(heartbeat())
    await asyncio.sleep(0)  # the first beat starts before the work does
    try:
        result = await work
    finally:
        watcher.cancel()
        await asyncio.wait({watcher})  # its last beat counts what blocked to the very end
    return result, longest


def is_finite_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
