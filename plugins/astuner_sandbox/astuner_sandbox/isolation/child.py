"""Start one confined child of the current process, with a channel to it.

The child inherits only standard input, output and error, so it can neither read from nor write to the connections of
its parent. It ends with its parent.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Collection
from typing import Any

from astuner.contracts.errors import AstunerError
from astuner_sandbox.isolation.channel import MAX_BYTES, Channel, now
from astuner_sandbox.isolation.confine import Confinement, Level, confine
from astuner_sandbox.isolation.linux import die_with
from astuner_sandbox.isolation.proc import how_it_ended, kill_with_group, leave, leave_after


class ForkFailed(AstunerError):
    """The child could not be confined; the message contains the reason."""


class ForkedChild:
    """Run ``function(channel, *args)`` in a forked child, which ends when the function returns.

    The forking process must have one thread. Arguments need not be JSON, because the child is a copy of this process.

    :param confinement: Confinement that the child applies before it calls the function; None leaves it unconfined.
    :param require: See `confine`.
    :param max_bytes: Maximum message length; receiving a message costs this process several times its length.
    :raises ForkFailed: The child could not be confined.
    """

    def __init__(
        self,
        function: Callable[..., object],
        *args: Any,
        confinement: Confinement | None = None,
        require: bool = False,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # otherwise the child prints it a second time
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            leave_after(lambda: _live(parent, theirs, confinement, require, function, args))
        theirs.close()
        self.channel = Channel(ours, max_bytes=max_bytes)
        self.returncode: int | None = None
        """Exit code, or the negative signal number; None while it runs."""
        try:
            started = self.channel.recv()
        except EOFError:
            started = {"failed": f"it ended immediately: {self.kill()}"}
        if "failed" in started:
            self.kill()
            raise ForkFailed(f"a child process could not be confined: {started['failed']}")
        self.level: Level | None = None if started["level"] is None else Level.from_json(started["level"])
        """Protection that the kernel granted."""

    def call(self, obj: Any, timeout: float | None = None) -> Any:
        """Send a message and return the answer.

        :param timeout: Seconds for both, because a child that reads slowly could use the same time again for the
            answer.
        :raises EOFError: The child has ended; the message describes how.
        :raises TimeoutError: No answer in time. Call `kill`, because a late answer would be taken for the next one.
        :raises ValueError: The answer is not JSON or too long. Call `kill`.
        """
        end = None if timeout is None else now() + timeout
        try:
            self.channel.send(obj, timeout=timeout)
            return self.channel.recv(None if end is None else max(0.0, end - now()))
        except EOFError:
            raise EOFError(f"the child process has ended: {self.kill()}") from None

    @property
    def alive(self) -> bool:
        """Whether the child runs."""
        self._reap(os.WNOHANG)
        return self.returncode is None

    @property
    def ended(self) -> str | None:
        """Return a description of how the child ended; None while it runs."""
        return None if self.alive or self.returncode is None else how_it_ended(self.returncode)

    def kill(self) -> str:
        """Kill the child and its process group immediately and describe how it ended. Can be called repeatedly."""
        if self.alive:
            kill_with_group(self.pid)
            self._reap(0)
        self.channel.close()
        assert self.returncode is not None
        return how_it_ended(self.returncode)

    def _reap(self, flags: int) -> None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, flags)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)


def _live(
    parent: int,
    sock: socket.socket,
    confinement: Confinement | None,
    require: bool,
    function: Callable[..., object],
    args: tuple[Any, ...],
) -> None:
    os.setsid()
    die_with(parent)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.set_wakeup_fd(-1)
    _empty_descriptors({0, 1, 2, sock.fileno()})
    channel = Channel(sock)
    try:
        level = None if confinement is None else confine(confinement, require).as_json()
    except (AstunerError, OSError) as e:
        channel.send({"failed": str(e)})
        leave(1)
    channel.send({"level": level})
    function(channel, *args)


def _empty_descriptors(keep: Collection[int]) -> None:
    """Redirect all other descriptors to the null device, because closed numbers could be reused."""
    null = os.open(os.devnull, os.O_RDWR)
    folder = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    for descriptor in [int(entry) for entry in os.listdir(folder)]:
        if descriptor not in keep and descriptor != null:
            with contextlib.suppress(OSError):  # the descriptor that listed them is closed again
                os.fstat(descriptor)
                os.dup2(null, descriptor, inheritable=False)
