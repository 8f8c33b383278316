"""Exchange JSON messages over a stream socket: four bytes of length, big-endian, then UTF-8.

Received data may come from hostile code, so its size is checked before it is stored. Waiting without a timeout does not
use a clock, because the clocks of some environments are frozen.
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
"""First bytes from a fork of a zygote: its own process ID."""
_MOST_DESCRIPTORS = 16
_AT_ONCE = 1 << 16
"""Bytes per read; most messages arrive in one read, including their length."""
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)


class Channel:
    """One end of a connection. Several threads may send; one thread receives.

    :param descriptors: Keep open files that the peer passes, in `received`; otherwise the kernel drops them.
    """

    def __init__(self, sock: socket.socket, *, max_bytes: int = MAX_BYTES, descriptors: bool = False) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._max_bytes = max_bytes
        self._buffer = bytearray()
        self._sending = threading.Lock()
        self._descriptors = descriptors
        self.received: deque[int] = deque()
        """Received file descriptors, oldest first; the caller that takes one closes it."""

    def send(self, obj: Any, *, descriptors: Sequence[int] = (), timeout: float | None = None) -> None:
        """Send one message with open files.

        :raises EOFError: The peer is gone.
        :raises TimeoutError: The peer does not read. A part may have been sent, so the channel is no longer usable.
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
            except BlockingIOError:  # pragma: no cover - poll reported that the socket is writable
                raise TimeoutError("the other process does not read") from None
            except (BrokenPipeError, ConnectionResetError):
                raise EOFError("the other process is gone") from None

    def recv(self, timeout: float | None = None) -> Any:
        """Return the next message; after a `TimeoutError`, the call can be repeated.

        :param timeout: Seconds; None waits forever.
        :raises EOFError: The peer is gone.
        :raises TimeoutError: No complete message arrived in time.
        :raises ValueError: The message is too long or not JSON. Close the channel.
        """
        deadline = _deadline(timeout)
        self._fill(_LENGTH.size, deadline)
        size = _checked(_LENGTH.unpack_from(self._buffer)[0], self._max_bytes)
        self._fill(_LENGTH.size + size, deadline)
        body = bytes(self._buffer[_LENGTH.size : _LENGTH.size + size])
        del self._buffer[: _LENGTH.size + size]
        return _decoded(body)

    def shutdown(self) -> None:
        """End the connection, from any thread: `recv` raises EOFError on both sides."""
        with contextlib.suppress(OSError):  # already ended
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket and all received descriptors that were not taken. Can be called repeatedly."""
        while self.received:
            os.close(self.received.popleft())
        self._sock.close()

    def fileno(self) -> int:
        """Return the socket's descriptor, -1 when closed. After a `recv`, the next message may be buffered already."""
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
        # never read beyond this message: descriptors of the next one must arrive with it
        data, received, _, _ = socket.recv_fds(self._sock, size, _MOST_DESCRIPTORS)
        for descriptor in received:
            os.set_inheritable(descriptor, False)
        self.received.extend(received)
        return data

    def _wait(self, event: int, deadline: float | None) -> None:
        if deadline is None:
            return  # the next call blocks
        left = deadline - now()
        poll = select.poll()
        poll.register(self._sock, event)
        if not poll.poll(max(0.0, left) * 1000):
            raise TimeoutError("the other process did not answer in time")


def encode_message(obj: Any, max_bytes: int = MAX_BYTES) -> bytes:
    """Return one message as bytes.

    :raises TypeError: ``obj`` is not JSON.
    :raises ValueError: It is too long or contains itself.
    """
    body = json.dumps(obj, separators=(",", ":")).encode()
    return _LENGTH.pack(_checked(len(body), max_bytes)) + body


async def read_message(reader: StreamReader, max_bytes: int = MAX_BYTES) -> Any:
    """Receive a message in asyncio; raise as `Channel.recv` does."""
    # imported here because only servers need it and children start faster without it
    from asyncio import IncompleteReadError

    try:
        (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        body = await reader.readexactly(_checked(size, max_bytes))
    except (IncompleteReadError, ConnectionResetError):
        raise EOFError("the other process is gone") from None
    return _decoded(body)


def _checked(size: int, max_bytes: int) -> int:
    if size > max_bytes:
        raise ValueError(f"a message of {size} bytes exceeds the limit of {max_bytes} bytes")
    return size


def _decoded(body: bytes) -> Any:
    try:
        return json.loads(body)
    except RecursionError:  # thousands of brackets
        raise ValueError("a message is nested too deeply") from None


def now() -> float:
    """Return seconds of the only clock that freezegun does not replace."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else now() + timeout
