"""An instance's process, as the event loop sees it: questions with a deadline, and its end; and what it is forked from.

Invariant: after `kill`, and after its own end, every question raises `ProcessGone`; one that is not answered in time
leaves the process killed, since its answer would be taken for the next one's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from astuner.support.threads import in_daemon_thread
from astuner_env.manager.refusal import Refusal
from astuner_env.manager.served import ServedEnvironment
from astuner_sandbox.isolation.channel import encode_message, read_message
from astuner_sandbox.isolation.zygotes import Fork, Zygote, ZygoteFailed

log = logging.getLogger("astuner_env.zygote")

MAX_ANSWER = 64 << 20
_LAST_WORDS = 2.0
"""Seconds in which the zygote reports how a process ended, once its socket is closed."""
START_TIMEOUT = 180.0
"""Seconds to import an environment; a first import from a cold disk is slow."""
FORK_TIMEOUT = 20.0
_HOLD = 2.0
"""Seconds for which a failed start is not repeated."""


class ProcessGone(Exception):
    """The process has ended; says how."""


class Process:
    """Speaks with one forked process; for one event loop, made by `start`."""

    def __init__(
        self, fork: Fork, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ended: asyncio.Event
    ) -> None:
        self._fork = fork
        self._reader = reader
        self._writer = writer
        self._ended = ended
        self._is_killed = False
        self.is_late = False
        """Whether it was killed because it did not answer in time."""

    @classmethod
    async def start(cls, zygote: Zygote, options: Mapping[str, Any], output: Path, seconds: float) -> Process:
        """A new fork of ``zygote``.

        :param output: the file for what it prints.
        :raises ZygoteFailed: the zygote has ended, or cannot fork within ``seconds``.
        """
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def report(_: Fork) -> None:  # in the zygote's reader thread
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody asks any more
                loop.call_soon_threadsafe(ended.set)

        make = partial(zygote.fork, options, output, seconds, on_exit=report)
        work = asyncio.ensure_future(in_daemon_thread(make, name="astuner-fork"))
        try:
            fork = await asyncio.shield(work)
        except asyncio.CancelledError:
            work.add_done_callback(_kill_unclaimed)
            raise
        fork.socket.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=fork.socket)
        return cls(fork, reader, writer, ended)

    @property
    def pid(self) -> int:
        return self._fork.pid

    async def ask(self, question: Mapping[str, Any], seconds: float) -> Any:
        """What the process answers.

        :raises asyncio.TimeoutError: it did not in time; it is killed.
        :raises ProcessGone: it ended instead.
        :raises Refusal: bad_params, bad_request or env_error, the environment's own.
        """
        timer = asyncio.get_running_loop().call_later(seconds, self._give_up)  # costs less than a task of its own
        try:
            answer = await self._exchange(question)
        except BaseException as e:
            self.kill()  # also when cancelled: the stream is out of step from here on
            if self.is_late and not isinstance(e, asyncio.CancelledError):
                raise asyncio.TimeoutError from None
            raise
        finally:
            timer.cancel()
        if self.is_late:  # it came in the moment in which it was killed
            raise asyncio.TimeoutError
        if "ok" in answer:
            return answer["ok"]
        error = answer["error"]
        raised = error["kind"] == "env_error"  # otherwise the environment says itself what is wrong
        message = f"{error['type']}: {error['message']}" if raised else error["message"]
        raise Refusal(error["kind"], message, place=error["place"] if raised else "", traceback=error["traceback"])

    def _give_up(self) -> None:
        self.is_late = True
        self.kill()

    async def _exchange(self, question: Mapping[str, Any]) -> Any:
        try:
            self._writer.write(encode_message(question))
            await self._writer.drain()
            return await read_message(self._reader, MAX_ANSWER)
        except (EOFError, ConnectionError):
            how = "was killed" if self._is_killed else await self.end()  # who killed it need not wait for the news
            raise ProcessGone(how) from None
        except ValueError as e:
            raise ProcessGone(f"wrote what cannot be read: {e}") from None

    async def end(self, patience: float | None = _LAST_WORDS) -> str:
        """How it ended; waits for the news, None for ever."""
        await self.wait(patience)
        return self._fork.ended or "closed its connection"

    async def wait(self, seconds: float | None) -> bool:
        """Wait until it has ended; whether it has."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._ended.wait(), seconds)
        return self._ended.is_set()

    def kill(self) -> None:
        """End it and everything it started, now; nothing happens when it has ended."""
        self._is_killed = True
        self._writer.close()
        self._fork.kill()


def _kill_unclaimed(work: asyncio.Future[Fork]) -> None:
    if not work.cancelled() and work.exception() is None:
        fork = work.result()
        fork.socket.close()
        fork.kill()


def log_tail(log: Path, size: int = 2000) -> str:
    """The end of what a process wrote to its output."""
    try:
        with log.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - size))
            return file.read().decode("utf-8", "replace").strip()
    except OSError:  # it wrote nothing, or its folder is gone
        return ""


class Keeper:
    """The zygote of one environment: started before it is needed, started anew when it has died.

    A zygote has imported its environment once; an instance is a fork of it, in milliseconds.  Invariant: at most one
    zygote per environment lives, and one that fails to start is not tried again at once by everybody who waits.
    """

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
