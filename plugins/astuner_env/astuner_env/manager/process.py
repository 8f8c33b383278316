"""An instance's process, as the event loop sees it: questions with a deadline, and its end.

Invariant: after `kill`, and after its own end, every question raises `ProcessGone`; one that is not answered in time
leaves the process killed, since its answer would be taken for the next one's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from astuner import in_daemon_thread
from astuner_env.manager.refusal import Refusal
from astuner_sandbox.isolation.channel import encode_message, read_message
from astuner_sandbox.isolation.zygotes import Fork, Keeper, tail

MAX_ANSWER = 64 << 20
_LAST_WORDS = 2.0
"""Seconds in which the zygote reports how a process ended, once its socket is closed."""
FORK_TIMEOUT = 20.0


class ProcessGone(Exception):
    """The process has ended; says how."""


@dataclass(eq=False)
class Process:
    """Speaks with one forked process; for one event loop, made by `start`."""

    _fork: Fork
    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter
    _ended: asyncio.Event
    _is_killed: bool = False
    is_late: bool = False
    """Whether it was killed because it did not answer in time."""

    @classmethod
    async def start(cls, zygote: Keeper, options: Mapping[str, Any], output: Path) -> Process:
        """A new fork of a zygote.

        :param output: the file for what it prints.
        :raises ZygoteFailed: none can be made.
        """
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def report(_: Fork) -> None:  # in the zygote's reader thread
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody asks any more
                loop.call_soon_threadsafe(ended.set)

        def make() -> Fork:
            with open(output, "ab", opener=partial(os.open, mode=0o600)) as file:
                said = file.fileno(), file.fileno()
                return zygote.fork(options, timeout=FORK_TIMEOUT, output=said, on_exit=report)

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
        :raises Refusal: bad_params, unknown_task, unknown_split or env_error, the environment's own.
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
            return tail(file, size)
    except OSError:  # it wrote nothing, or its folder is gone
        return ""
