"""Many questions at once: what fails for one example does not stop the others, unless it fails for too many.

Invariant: when this ends, however it ends, nothing that it started is still running.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from astuner_helpers import HelperFailed

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
    asked = failed = 0
    most = max(1, int(_MAY_FAIL * len(items)))

    async def one(item: T) -> R | None:
        nonlocal asked, failed
        result: R | None = None
        try:
            result = await work(item)
        except HelperFailed as e:
            failed += 1
            if failed > most or len(items) == 1:
                raise HelperFailed(
                    f"{what}: the helper could not be asked ({e}); stopped after {asked - failed + 1} of {len(items)}, "
                    f"since {failed} failed"
                ) from e
        asked += 1
        if asked % max(1, len(items) // _REPORTS) == 0 or asked == len(items):
            say(f"{what}: {asked} of {len(items)}" + (f", of which {failed} failed" if failed else ""))
        return result

    tasks = [asyncio.ensure_future(one(item)) for item in items]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
