"""Keeps one zygote per environment: started before it is needed, started anew when it has died.

A zygote has imported its environment once; an instance is a fork of it, in milliseconds.  Invariant: at most one
zygote per environment lives, and one that fails to start is not tried again at once by everybody who waits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from astuner.support.threads import in_daemon_thread
from astuner_env.manager.process import Process
from astuner_env.manager.refusal import Refusal
from astuner_env.manager.served import ServedEnvironment
from astuner_sandbox.isolation.zygotes import Zygote, ZygoteFailed

log = logging.getLogger("astuner_env.zygote")

START_TIMEOUT = 180.0
"""Seconds to import an environment; a first import from a cold disk is slow."""
FORK_TIMEOUT = 20.0
_HOLD = 2.0
"""Seconds for which a failed start is not repeated."""


class Keeper:
    """The zygote of one environment."""

    def __init__(
        self, environment: ServedEnvironment, home: Path, on_restart: Callable[[], None] = lambda: None
    ) -> None:
        self.environment = environment
        self._home = home
        self._on_restart = on_restart
        self._zygote: Zygote | None = None
        self._starting = asyncio.Lock()
        self._failure: tuple[float, ZygoteFailed] | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The living zygote's pid."""
        return self._zygote.pid if self._zygote is not None and self._zygote.is_alive else None

    async def start(self) -> Zygote:
        """The living zygote; starts one when there is none.

        :raises ZygoteFailed: it does not start; has the end of what it said.
        """
        async with self._starting:
            if self._closed:
                raise ZygoteFailed("the service is stopping")
            if self._zygote is not None:
                if self._zygote.is_alive:
                    return self._zygote
                await self._clear_away()
            if self._failure is not None and time.monotonic() - self._failure[0] < _HOLD:
                raise self._failure[1]
            self._home.mkdir(mode=0o700, parents=True, exist_ok=True)
            zygote = Zygote(self.environment.zygote(self._home))
            self._zygote = zygote  # before it runs, so that `close` reaches it
            try:
                await in_daemon_thread(zygote.start, START_TIMEOUT, name="astuner-zygote-start")
            except ZygoteFailed as e:
                self._failure = time.monotonic(), e
                raise
            self._failure = None
            return zygote

    async def fork(self, options: Mapping[str, Any], output: Path) -> Process:
        """A new process for one instance.

        :param output: the file for what it prints.
        :raises ZygoteFailed: none can be made.
        """
        try:
            return await Process.start(await self.start(), options, output, FORK_TIMEOUT)
        except ZygoteFailed:
            if self._closed or self.pid is not None:
                raise
        # the zygote died before anything was begun, so it is fair to try once more
        return await Process.start(await self.start(), options, output, FORK_TIMEOUT)

    async def _clear_away(self) -> None:
        assert self._zygote is not None
        log.warning("a zygote died", extra={"environment": self.environment.name, "pid": self._zygote.pid})
        self._on_restart()
        await in_daemon_thread(self._zygote.close, name="astuner-zygote-close")
        self._zygote = None

    async def close(self) -> None:
        """End the zygote and all that was forked from it."""
        self._closed = True
        if self._zygote is not None:
            await in_daemon_thread(self._zygote.close, name="astuner-zygote-close")


def not_started(environment: ServedEnvironment, error: ZygoteFailed) -> Refusal:
    """What to tell a client when no process can be made."""
    last = str(error).strip().splitlines()[-1] if str(error).strip() else "it said nothing"
    how = f"type: {environment.hint}" if environment.hint else "look at the service's log"
    return Refusal(
        "env_error",
        f"no process of the environment {environment.name!r} can be started; {how}",
        place=f" ({last[:500]})",
        traceback=str(error),
    )
