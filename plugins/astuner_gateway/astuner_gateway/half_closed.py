"""Detect whether a client that stopped sending still reads its answer.

A client that shuts down its sending side and one that closes its connection send the same: the end of the stream. On
Linux they can be distinguished. A connection that the peer reset is no longer in the state CLOSE_WAIT. A peer on this
machine that closed its socket, or whose process ended, leaves a connection that belongs to no open file. A peer on
another machine answers keep-alive probes until its system forgets the closed socket, 60 seconds by default.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

CAN_TELL = sys.platform == "linux"
"""Whether this system shows which clients still read; elsewhere the end of the stream counts as a disconnect."""
LOOK_SECONDS = 0.2
"""Seconds between two checks of a client."""
_ESTABLISHED, _CLOSE_WAIT = 1, 8
_UNACKNOWLEDGED = 0x5411  # SIOCOUTQ
_ACKNOWLEDGE_SECONDS = 2.0
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_PROBES = (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 5))


def probe(connection: Any) -> None:
    """Let the system ask the peer of a half-closed connection every second whether it knows the connection.

    :param connection: Socket of a transport.
    """
    with suppress(OSError, AttributeError):
        for name, value in _PROBES:
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def is_gone(connection: Any) -> bool:
    """Return whether the peer of a half-closed connection no longer reads."""
    if _is_reset(connection):
        return True
    try:
        here, there = connection.getsockname()[:2], connection.getpeername()[:2]
    except OSError:
        return True
    peer, own = _address(there[0]), _address(here[0])
    if not (peer.is_loopback or peer == own):
        return False
    return not _is_open(peer, int(there[1]), own, int(here[1]))


def _is_reset(connection: Any) -> bool:
    try:
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] not in (_ESTABLISHED, _CLOSE_WAIT)
    except OSError:
        return True


async def is_delivered(connection: Any) -> bool:
    """Wait until the peer has acknowledged all data; return False if it reset the connection."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _ACKNOWLEDGE_SECONDS
    while not _is_reset(connection):
        if not _unacknowledged(connection):
            return not _is_reset(connection)
        if loop.time() > deadline:
            return False
        await asyncio.sleep(0.01)
    return False


def _unacknowledged(connection: Any) -> int:
    import fcntl

    try:
        return int(struct.unpack("i", fcntl.ioctl(connection.fileno(), _UNACKNOWLEDGED, b"\0" * 4))[0])
    except OSError:
        return 0


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    found = ipaddress.ip_address(text.partition("%")[0])
    return getattr(found, "ipv4_mapped", None) or found


def _is_open(peer: Any, peer_port: int, own: Any, own_port: int) -> bool:
    """Return whether the peer's end, on this machine, belongs to an open file."""
    wanted = {
        (f"{a}:{peer_port:04X}", f"{b}:{own_port:04X}") for a, b in zip(_spelled(peer), _spelled(own), strict=True)
    }
    for table in _TABLES:
        with suppress(OSError), table.open() as lines:
            for line in lines:
                columns = line.split()
                if len(columns) > 9 and (columns[1], columns[2]) in wanted:
                    return columns[9] != "0"
    return False


def _spelled(address: Any) -> list[str]:
    """Return an address as in the tables: 32-bit words in the machine's byte order, also as an IPv6 address."""
    words = [address.packed]
    if address.version == 4:
        words.append(b"\0" * 10 + b"\xff\xff" + address.packed)
    else:
        words.append(address.packed)
    return ["".join(f"{word:08X}" for word in struct.unpack(f"={len(each) // 4}I", each)) for each in words]
