"""Run blocking calls outside the event loop, each in its own daemon thread.

Threads cannot be killed. With one daemon thread per call, a call that never returns blocks neither the next call (as a
pool's worker would) nor the interpreter's exit.

Invariant: the result or exception of a call reaches its awaiter, unless the await was canceled.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def in_daemon_thread(function: Callable[..., T], *args: Any, name: str = "astuner") -> T:
    """Await ``function(*args)`` in a daemon thread; canceling the await abandons the thread."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def deliver(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def work() -> None:
        result: T | None = None
        error: BaseException | None = None
        try:
            result = context.run(function, *args)
        except StopIteration as e:  # futures do not accept StopIteration
            error = RuntimeError(f"{type(e).__name__} raised by {function!r}")
        except BaseException as e:
            error = e
        if not loop.is_closed():
            loop.call_soon_threadsafe(deliver, result, error)

    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return await future
