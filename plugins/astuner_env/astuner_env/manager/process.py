"""Exchange messages with the process of an instance, with deadlines, on the event loop.

Invariant: after `kill`, or after the process has ended, every question raises `ProcessGone`. A process that misses a
deadline is killed, because its late answer would be taken for the next one.
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
"""Seconds to wait for the zygote's report after the socket of a process was closed."""
FORK_TIMEOUT = 20.0


class ProcessGone(Exception):
    """Raised when the process has ended; the message describes how."""


@dataclass(eq=False)
class Process:
    """Connection to one forked process on one event loop; create it with `start`."""

    _fork: Fork
    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter
    _ended: asyncio.Event
    _is_killed: bool = False
    is_late: bool = False
    """Whether it was killed because it missed a deadline."""

    @classmethod
    async def start(cls, zygote: Keeper, options: Mapping[str, Any], output: Path) -> Process:
        """Fork a new process from a zygote.

        :param output: File for its standard output and error.
        :raises ZygoteFailed: The zygote cannot fork.
        """
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def report(_: Fork) -> None:  # in the zygote's reader thread
            with contextlib.suppress(RuntimeError):  # the loop is closed
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
        """Return the answer of the process.

        :raises asyncio.TimeoutError: No answer in time; the process is killed.
        :raises ProcessGone: The process ended.
        :raises Refusal: bad_params, unknown_task, unknown_split or env_error, raised by the environment.
        """
        timer = asyncio.get_running_loop().call_later(seconds, self._give_up)  # cheaper than a separate task
        try:
            answer = await self._exchange(question)
        except BaseException as e:
            self.kill()  # also when cancelled: the stream is out of sync now
            if self.is_late and not isinstance(e, asyncio.CancelledError):
                raise asyncio.TimeoutError from None
            raise
        finally:
            timer.cancel()
        if self.is_late:  # the answer arrived while the process was being killed
            raise asyncio.TimeoutError
        if "ok" in answer:
            return answer["ok"]
        error = answer["error"]
        raised = error["kind"] == "env_error"  # other messages already describe the problem
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
            how = "was killed" if self._is_killed else await self.end()  # no need to wait for a report
            raise ProcessGone(how) from None
        except ValueError as e:
            raise ProcessGone(f"sent an unreadable answer: {e}") from None

    async def end(self, patience: float | None = _LAST_WORDS) -> str:
        """Wait for the process to end and return how it ended; ``None`` waits without a limit."""
        await self.wait(patience)
        return self._fork.ended or "closed its connection"

    async def wait(self, seconds: float | None) -> bool:
        """Wait until the process has ended and return whether it has."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._ended.wait(), seconds)
        return self._ended.is_set()

    def kill(self) -> None:
        """Kill the process and all processes it started; do nothing if it has ended."""
        self._is_killed = True
        self._writer.close()
        self._fork.kill()


def _kill_unclaimed(work: asyncio.Future[Fork]) -> None:
    if not work.cancelled() and work.exception() is None:
        fork = work.result()
        fork.socket.close()
        fork.kill()


def log_tail(log: Path, size: int = 2000) -> str:
    """Return the last bytes that a process wrote to its output."""
    try:
        with log.open("rb") as file:
            return tail(file, size)
    except OSError:  # no output, or the folder was removed
        return ""
