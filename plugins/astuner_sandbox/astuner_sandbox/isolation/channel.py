"""JSON messages over a stream socket: four bytes of length, big-endian, then UTF-8.

What arrives is data from code that may be hostile, so its size is bounded before anything is kept.  Waiting without a
timeout looks at no clock at all: in some environments' processes the clocks stand still.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncio import StreamReader

MAX_BYTES = 64 << 20
_LENGTH = struct.Struct(">I")
PID = struct.Struct(">I")
"""What a fork of a zygote sends before anything else: its own pid."""
_MOST_DESCRIPTORS = 16
_AT_ONCE = 1 << 16
"""Bytes read in one go: most messages arrive whole, with their length."""
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)


class Channel:
    """One end. Several threads may send; one thread receives.

    :param descriptors: keep open files that the peer passes, in `received`; otherwise the kernel drops them.
    """

    def __init__(self, sock: socket.socket, *, max_bytes: int = MAX_BYTES, descriptors: bool = False) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._max_bytes = max_bytes
        self._buffer = bytearray()
        self._sending = threading.Lock()
        self._descriptors = descriptors
        self.received: deque[int] = deque()
        """File descriptors that arrived, oldest first; whoever takes one closes it."""

    def send(self, obj: Any, *, descriptors: Sequence[int] = (), timeout: float | None = None) -> None:
        """Send one message, and open files with it.

        :raises EOFError: the peer is gone.
        :raises TimeoutError: the peer does not read; a part may have been sent, so the channel is of no use any more.
        :raises TypeError: ``obj`` is not JSON.
        """
        left = memoryview(encode_message(obj, self._max_bytes))
        with self._sending:
            deadline = _deadline(timeout)
            flags = _NO_SIGNAL if deadline is None else _NO_SIGNAL | socket.MSG_DONTWAIT
            try:
                if descriptors:
                    self._wait(select.POLLOUT, deadline)
                    left = left[socket.send_fds(self._sock, [left], list(descriptors)) :]
                while left:
                    self._wait(select.POLLOUT, deadline)
                    left = left[self._sock.send(left, flags) :]
            except BlockingIOError:  # pragma: no cover - poll said there was room
                raise TimeoutError("the other process does not read") from None
            except (BrokenPipeError, ConnectionResetError):
                raise EOFError("the other process is gone") from None

    def recv(self, timeout: float | None = None) -> Any:
        """The next message; after a `TimeoutError` it can be asked for again.

        :param timeout: seconds; None waits for ever.
        :raises EOFError: the peer is gone.
        :raises TimeoutError: nothing whole arrived in time.
        :raises ValueError: what arrived is longer than allowed, or is not JSON; close the channel.
        """
        deadline = _deadline(timeout)
        self._fill(_LENGTH.size, deadline)
        size = _checked(_LENGTH.unpack_from(self._buffer)[0], self._max_bytes)
        self._fill(_LENGTH.size + size, deadline)
        body = bytes(self._buffer[_LENGTH.size : _LENGTH.size + size])
        del self._buffer[: _LENGTH.size + size]
        return _decoded(body)

    def shutdown(self) -> None:
        """End the conversation, from any thread: whoever waits in `recv`, here or there, gets an EOFError."""
        with contextlib.suppress(OSError):  # it has ended already
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket and whatever was received and not taken; harmless when done already."""
        while self.received:
            os.close(self.received.popleft())
        self._sock.close()

    def fileno(self) -> int:
        """The socket's descriptor, -1 when closed; after a `recv` it may be silent though the next message is here."""
        return self._sock.fileno()

    def _fill(self, size: int, deadline: float | None) -> None:
        while len(self._buffer) < size:
            self._wait(select.POLLIN, deadline)
            try:
                chunk = self._read(min(size - len(self._buffer), 1 << 20))
            except ConnectionResetError:
                chunk = b""
            if not chunk:
                raise EOFError("the other process is gone")
            self._buffer += chunk

    def _read(self, size: int) -> bytes:
        if not self._descriptors:
            return self._sock.recv(max(size, _AT_ONCE))
        # never beyond this message: what is passed with the next one must arrive with it
        data, received, _, _ = socket.recv_fds(self._sock, size, _MOST_DESCRIPTORS)
        for descriptor in received:
            os.set_inheritable(descriptor, False)
        self.received.extend(received)
        return data

    def _wait(self, event: int, deadline: float | None) -> None:
        if deadline is None:
            return  # the call that follows blocks
        left = deadline - now()
        poll = select.poll()
        poll.register(self._sock, event)
        if not poll.poll(max(0.0, left) * 1000):
            raise TimeoutError("the other process did not answer in time")


def encode_message(obj: Any, max_bytes: int = MAX_BYTES) -> bytes:
    """One message as it crosses the wire.

    :raises TypeError: ``obj`` is not JSON.
    :raises ValueError: it is too long, or holds itself.
    """
    body = json.dumps(obj, separators=(",", ":")).encode()
    return _LENGTH.pack(_checked(len(body), max_bytes)) + body


async def read_message(reader: StreamReader, max_bytes: int = MAX_BYTES) -> Any:
    """`Channel.recv` for asyncio; raises as it does."""
    from asyncio import IncompleteReadError  # only servers need it; children start faster without

    try:
        (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        body = await reader.readexactly(_checked(size, max_bytes))
    except (IncompleteReadError, ConnectionResetError):
        raise EOFError("the other process is gone") from None
    return _decoded(body)


def _checked(size: int, max_bytes: int) -> int:
    if size > max_bytes:
        raise ValueError(f"a message of {size} bytes is longer than the {max_bytes} that are allowed")
    return size


def _decoded(body: bytes) -> Any:
    try:
        return json.loads(body)
    except RecursionError:  # thousands of brackets: not an error of ours
        raise ValueError("a message is nested too deeply") from None


def now() -> float:
    """Seconds, of the one clock that freezegun leaves alone."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else now() + timeout
