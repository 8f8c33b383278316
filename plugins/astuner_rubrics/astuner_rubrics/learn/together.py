"""Many questions at once: what fails for one example does not stop the others, unless it fails for too many.

Invariant: when this ends, however it ends, nothing that it started is still running.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from astuner.helper_models import HelperFailed

T = TypeVar("T")
R = TypeVar("R")

_MAY_FAIL = 0.1
_REPORTS = 4


async def for_each(
    items: Sequence[T], work: Callable[[T], Awaitable[R]], *, what: str, say: Callable[[str], None]
) -> list[R | None]:
    """The result for each item, None where the helper failed for it.

    :param what: what is done, for progress: ``proposing criteria``.
    :raises HelperFailed: it failed for more than a tenth of the items, and at least two.
    """
    done = failed = 0
    reason = ""
    most = max(1, int(_MAY_FAIL * len(items)))

    async def one(item: T) -> R | None:
        nonlocal done, failed, reason
        try:
            return await work(item)
        except HelperFailed as e:
            failed, reason = failed + 1, str(e)
            if failed > most or len(items) == 1:
                raise HelperFailed(f"{what} failed for {failed} of {len(items)} examples: {reason}") from e
            return None
        finally:
            done += 1
            if done % max(1, len(items) // _REPORTS) == 0 or done == len(items):
                say(f"{what}: {done} of {len(items)}")

    tasks = [asyncio.ensure_future(one(item)) for item in items]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
